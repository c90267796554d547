"""Models from a hub, over HTTP: complete and linked, or one sentence that says why not."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from engine.fake_hub import COMMIT, TOKEN, FakeHub, fake_hub

from kllm_core.models import hub as hub_module
from kllm_core.models.exceptions import DiskFullError, ModelError
from kllm_engine.models.resolve import resolve


@dataclass
class Done:
    """What the program said."""

    code: int
    stderr: str
    event: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The model's folder that it names."""
        return Path(self.event["path"]).resolve()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return resolve("demo://tiny-random-llama", tmp_path_factory.mktemp("source"), lambda _: None)


@pytest.fixture
async def hub(model):
    async with fake_hub(model) as served:
        yield served


async def fetch(endpoint: str, uri: str, cache: Path, *flags: str, **environment: str) -> Done:
    """Run the program as an init container does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kllm_engine.main", "model", uri, "--cache", str(cache), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "home")} | environment,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return Done(process.returncode or 0, err.decode(), json.loads(out.splitlines()[-1]))


def complete(folder: Path, model: Path) -> bool:
    return all((folder / path.name).read_bytes() == path.read_bytes() for path in model.iterdir())


async def test_a_model_is_downloaded_from_the_endpoint_that_is_set_and_linked(hub: FakeHub, model, tmp_path):
    link = tmp_path / "current"
    done = await fetch(hub.endpoint, "hf://team/tiny", tmp_path / "cache", "--link", str(link))
    assert done.code == 0, done.stderr
    assert done.event["event"] == "model"
    assert link.is_symlink()
    assert link.resolve() == done.folder
    assert complete(link, model)


async def test_a_cached_model_is_used_while_the_hub_is_away(hub: FakeHub, model, tmp_path):
    assert (await fetch(hub.endpoint, "hf://team/tiny", tmp_path)).code == 0
    downloads = len(hub.downloads)
    again = await fetch(hub.endpoint, "hf://team/tiny", tmp_path)
    away = await fetch("http://127.0.0.1:9", "hf://team/tiny", tmp_path)
    assert (again.code, away.code) == (0, 0)
    assert len(hub.downloads) == downloads
    assert complete(away.folder, model)


async def test_a_revision_and_a_token_are_passed_on(hub: FakeHub, tmp_path):
    done = await fetch(hub.endpoint, f"hf://team/private@{COMMIT}", tmp_path, HF_TOKEN=TOKEN)
    assert done.code == 0, done.stderr
    assert COMMIT in done.event["path"]


@pytest.mark.parametrize(
    ("uri", "code", "reason", "words"),
    [
        ("hf://team/absent", 3, "ModelNotFound", "does not exist"),
        ("hf://team/private", 3, "ModelNotFound", "HF_TOKEN"),
        ("hf://team/tiny@v9", 3, "ModelNotFound", "no revision 'v9'"),
        ("hf://team/gated", 3, "ModelAccessDenied", "accept its terms"),
        ("hf://team/forbidden", 3, "ModelAccessDenied", "answered 403"),
        ("hf://team/busy", 4, "HubUnreachable", "answered 503"),
        ("hf://team/broken", 4, "HubUnreachable", "could not be downloaded"),
        ("hf://a", 2, "WrongAddress", "hf://ORG/NAME"),
        ("hf://a/b/c", 2, "WrongAddress", "hf://ORG/NAME"),
        ("s3://bucket/model", 2, "WrongAddress", "unknown model address"),
    ],
)
async def test_what_cannot_be_had_ends_with_a_code_and_one_sentence(hub: FakeHub, tmp_path, uri, code, reason, words):
    link = tmp_path / "current"
    done = await fetch(hub.endpoint, uri, tmp_path / "cache", "--link", str(link))
    assert done.code == code, done.stderr
    assert (done.event["event"], done.event["reason"]) == ("failed", reason)
    last = done.stderr.splitlines()[-1]
    assert last == f"kllm-engine: {reason}: {done.event['message']}"
    assert words in last
    assert not link.is_symlink()


async def test_a_hub_that_is_not_there_is_named_as_such(tmp_path):
    done = await fetch("http://127.0.0.1:9", "hf://team/tiny", tmp_path)
    assert done.code == 4
    assert done.event["reason"] == "HubUnreachable"
    assert "HF_ENDPOINT" in done.event["message"]


async def test_a_hub_that_is_silent_is_not_waited_for_for_ever(tmp_path):
    """The kernel accepts its connections, and nobody answers them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = await fetch(endpoint, "hf://team/tiny", tmp_path, HF_HUB_ETAG_TIMEOUT="1")
    assert (done.code, done.event["reason"]) == (4, "HubUnreachable")


async def test_a_link_moves_from_one_model_to_the_next_and_spares_what_is_no_link(hub: FakeHub, tmp_path):
    link = tmp_path / "current"
    await fetch(hub.endpoint, "hf://team/tiny", tmp_path / "cache", "--link", str(link))
    first = link.resolve()
    done = await fetch(hub.endpoint, "demo://tiny-random-llama", tmp_path / "cache", "--link", str(link))
    assert done.code == 0
    assert link.resolve() == done.folder != first
    link.unlink()
    link.mkdir()
    refused = await fetch(hub.endpoint, "demo://tiny-random-llama", tmp_path / "cache", "--link", str(link))
    assert refused.code == 1
    assert "is no symbolic link" in refused.event["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "current"]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [(errno.ENOSPC, DiskFullError, "free some space"), (errno.EROFS, ModelError, "cannot be written")],
)
def test_a_cache_that_takes_no_more_is_named_as_such(tmp_path, monkeypatch, number, kind, words):
    def full(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(kind, match=words):
        hub_module.fetch("team/tiny", cache_dir=tmp_path, patterns=["*"], progress=lambda _: None)


async def test_a_model_without_weights_is_unusable(model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    for path in source.glob("*.safetensors"):
        path.unlink()
    async with fake_hub(source) as hub:
        done = await fetch(hub.endpoint, "hf://team/tiny", tmp_path / "cache")
    assert (done.code, done.event["reason"]) == (6, "ModelUnusable")
