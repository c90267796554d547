"""`kllm-router tokenizer` against a hub on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from router_brain.brain_helpers import write_model
from router_brain.fake_hub import FakeHub

from kllm_core.termination import tell_why
from kllm_router import tokenizer_command
from kllm_router.frontend.tokenizer import ModelTokenizer


def kllm_router(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kllm_router.main", "tokenizer", *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def hub(tmp_path):
    """One that has a small model with weights."""
    folder = write_model(tmp_path / "model", template_file=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with FakeHub({**files, "model.safetensors": b"x" * 1000, "README.md": b"text"}).running() as hub:
        yield hub


def test_only_what_the_router_reads_is_fetched_and_linked(hub, tmp_path):
    cache, link = tmp_path / "cache", tmp_path / "links" / "current"
    done = kllm_router("hf://org/model", "--cache", cache, "--link", link, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert sorted(hub.fetched) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
    assert "Bearer hf_secret" in hub.tokens
    assert Path(json.loads(done.stdout)["path"]) == link.readlink()
    assert ModelTokenizer(link).encode("Hello")


def test_what_is_there_already_needs_no_hub(hub, tmp_path):
    assert kllm_router("hf://org/model", "--cache", tmp_path / "cache", HF_ENDPOINT=hub.url).returncode == 0
    again = kllm_router("hf://org/model", "--cache", tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ((401, "RepoNotFound"), 3, "needs HF_TOKEN"),
        ((403, "GatedRepo"), 3, "accept its terms"),
        ((404, "RevisionNotFound"), 3, "no revision"),
        ((503, ""), 4, "503"),
    ],
)
def test_a_hub_that_refuses_is_told_in_one_sentence(hub, tmp_path, error, code, said):
    hub.error = error
    done = kllm_router("hf://org/model@v1", "--cache", tmp_path / "cache", HF_ENDPOINT=hub.url)
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_hub_that_is_away_is_told(tmp_path):
    done = kllm_router("hf://org/model", "--cache", tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 4
    assert "HF_ENDPOINT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_that_is_silent_is_not_waited_for_for_ever(tmp_path):
    """The kernel accepts its connections, and nobody answers them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = kllm_router(
            "hf://org/model", "--cache", tmp_path / "cache", HF_ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT="1"
        )
    assert done.returncode == 4, done.stderr


def test_a_folder_is_only_linked(tmp_path):
    folder = write_model(tmp_path / "model")
    done = kllm_router(folder, "--cache", tmp_path / "cache", "--link", tmp_path / "current")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "current").readlink() == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("uri", "code", "said"),
    [
        ("demo://smollm2-135m", 2, "WrongAddress: demo://smollm2-135m is made by the engine"),
        ("s3://bucket/model", 2, "hf://ORG/NAME"),
        ("hf://model", 2, "hf://ORG/NAME"),
        ("/nowhere", 3, "ModelNotFound: /nowhere: there is no such folder"),
        ("/", 6, "ModelUnusable: / has no tokenizer.json"),
    ],
)
def test_an_address_that_is_of_no_use_is_refused(tmp_path, monkeypatch, capsys, uri, code, said):
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(tokenizer_command, "tell_why", partial(tell_why, path=log))
    assert tokenizer_command.run([uri, "--cache", str(tmp_path)]) == code
    assert said in capsys.readouterr().err
    assert said in log.read_text()


def test_a_disk_that_is_full_and_a_link_that_cannot_be_are_told(tmp_path, monkeypatch, capsys):
    folder = write_model(tmp_path / "model")
    arguments = [str(folder), "--cache", str(tmp_path), "--link", str(folder / "config.json" / "current")]
    assert tokenizer_command.run(arguments) == 1
    assert "--link" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    assert tokenizer_command.run([str(folder), "--cache", str(tmp_path), "--link", str(tmp_path / "current")]) == 5
    assert "No space left" in capsys.readouterr().err


def test_wrong_arguments_are_named():
    done = kllm_router("hf://org/model")
    assert done.returncode == 2
    assert "--cache" in done.stderr
