from __future__ import annotations

import sys
from pathlib import Path

from charts.chart_helpers import render
from cluster.image_files import written

from e2e.host import HostEnvironment, write_image
from e2e.targets import kind_settings
from e2e.values import chart_values


def test_a_pod_sees_the_interpreter_the_environment_and_the_repository() -> None:
    host = HostEnvironment.of_this_process()
    for needed in (Path(sys.prefix), Path(sys.base_prefix).resolve(), Path(__file__), Path("/usr/bin")):
        assert any(needed.is_relative_to(folder) for folder in host.folders), needed


def test_no_folder_is_mounted_inside_another() -> None:
    folders = HostEnvironment.of_this_process().folders
    assert not [(one, other) for one in folders for other in folders if one != other and one.is_relative_to(other)]


def test_each_volume_is_mounted_read_only_at_the_machines_path() -> None:
    host = HostEnvironment.of_this_process(prefix="/elsewhere")
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in host.volumes()}
    assert {mount["name"]: f"/elsewhere{mount['mountPath']}" for mount in host.mounts()} == volumes
    assert all(mount["readOnly"] for mount in host.mounts())


def test_kinds_node_has_what_the_volumes_name() -> None:
    host = HostEnvironment.of_this_process(prefix="/elsewhere")
    (node,) = kind_settings(host)["nodes"]
    offered = {mount["containerPath"]: mount["hostPath"] for mount in node["extraMounts"]}
    assert set(offered) == {volume["hostPath"]["path"] for volume in host.volumes()}
    assert set(offered.values()) == {str(folder) for folder in host.folders}


def test_the_image_finds_the_systems_libraries_where_the_machine_does(tmp_path: Path) -> None:
    write_image(tmp_path / "host.tar")
    _, _, layer = written(tmp_path / "host.tar")
    for part in ("bin", "lib", "lib64"):
        link = Path("/", part)
        if link.is_symlink():
            assert layer.getmember(part).linkname == str(link.readlink())


def test_the_chart_takes_the_values() -> None:
    host = HostEnvironment.of_this_process()
    rendered = render(chart_values(host))
    (deployment,) = [document for document in rendered if document["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "kllm/host:e2e"
    assert container["imagePullPolicy"] == "Never"
    assert container["command"] == host.command("kllm_operator.main")
    assert {mount["mountPath"] for mount in host.mounts()} <= {
        mount["mountPath"] for mount in container["volumeMounts"]
    }
