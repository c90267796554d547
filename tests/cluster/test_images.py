from __future__ import annotations

from pathlib import Path

import pytest
from cluster.image_files import written

from e2e.cluster import images


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    images.write(
        path,
        "kllm/some:tag",
        files={"/opt/bin/program": b"content"},
        folders=["/tmp", "/deep/er"],
        links={"/lib": "usr/lib"},
        command=["/opt/bin/program"],
    )
    return path


def test_an_image_is_called_and_runs_what_it_was_written_with(image: Path) -> None:
    manifest, settings, _ = written(image)
    assert manifest["RepoTags"] == ["kllm/some:tag"]
    assert settings["config"]["Cmd"] == ["/opt/bin/program"]


def test_a_layer_holds_folders_before_what_is_in_them(image: Path) -> None:
    _, _, layer = written(image)
    names = layer.getnames()
    for name in names:
        assert all(names.index(str(parent)) < names.index(name) for parent in list(Path(name).parents)[:-1])
    assert {"deep", "deep/er", "opt", "opt/bin"} <= set(names)


def test_files_can_be_run_and_everyone_can_write_temporary_ones(image: Path) -> None:
    _, _, layer = written(image)
    assert layer.extractfile("opt/bin/program").read() == b"content"
    assert layer.getmember("opt/bin/program").mode == 0o755
    assert layer.getmember("tmp").mode == 0o1777
    assert layer.getmember("lib").linkname == "usr/lib"


def test_equal_images_are_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for path in paths:
        images.write(path, "kllm/some:tag", files={"/b": b"2", "/a": b"1"})
    assert paths[0].read_bytes() == paths[1].read_bytes()
