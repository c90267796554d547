from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e import targets
from e2e.cluster import binaries, components
from e2e.cluster.cluster import Cluster
from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.traces import traces


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(home=tmp_path / "home", cache=tmp_path / "cache")


def test_without_root_nothing_is_touched(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in (Cluster(layout).up, Cluster(layout).down):
        with pytest.raises(ClusterError, match="needs root"):
            action()
    assert not layout.cache.exists()


def test_without_go_a_person_is_told(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"Go 1\.24 or newer"):
        binaries.ensure(layout)


def test_what_is_in_the_cache_is_not_built_again(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    target = binaries.folder(layout)
    target.mkdir(parents=True)
    for program in binaries.PROGRAMS:
        (target / program.name).touch(mode=0o755)
    assert binaries.ensure(layout) == target


def test_an_unknown_program_or_component_is_refused(layout: Layout) -> None:
    with pytest.raises(ClusterError, match="no such program: kubeadm"):
        binaries.ensure(layout, only=["kubeadm"])
    with pytest.raises(ClusterError, match="no such component: kubeadm; there are etcd, kube-apiserver"):
        Cluster(layout).start("kubeadm")


def test_short_names_are_of_components(layout: Layout) -> None:
    assert set(components.SHORT_NAMES.values()) <= set(components.commands(layout, layout.cache))


def test_components_write_below_the_clusters_folder_only(layout: Layout) -> None:
    for command in components.commands(layout, layout.cache).values():
        paths = [word.partition("=")[2] for word in command if "=/" in word]
        assert all(Path(path).is_relative_to(layout.home) for path in paths), command


def test_a_cluster_that_never_was_leaves_no_folder_or_process(layout: Layout) -> None:
    assert not [trace for trace in traces(layout) if trace.startswith(("folder", "process", "mount"))]
    layout.home.mkdir()
    assert f"folder {layout.home}" in traces(layout)


def test_a_kubeconfig_of_ones_own_needs_values(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KLLM_E2E_VALUES", raising=False)
    with pytest.raises(ClusterError, match="KLLM_E2E_VALUES"):
        targets.find(tmp_path)
