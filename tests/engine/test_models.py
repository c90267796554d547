"""Models become complete folders, once, or a clear error."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from kllm_core.models.exceptions import ModelError, ModelUnavailableError, ModelUnusableError
from kllm_engine.models import resolve as resolve_module
from kllm_engine.models import smollm2, store, tiny
from kllm_engine.models.command import run
from kllm_engine.models.gguf import GgufFile
from kllm_engine.models.resolve import resolve
from kllm_engine.models.store import ensure_folder, find_damage


def quiet(_message: str) -> None:
    """Progress that nobody reads."""


def write_two(folder: Path) -> None:
    (folder / "a").write_text("one")
    (folder / "b").write_text("two")


def ensure(folder: Path, build=write_two, *, recipe: str = "r/1", needed: int = 10, progress=quiet) -> Path:
    return ensure_folder(folder, recipe=recipe, build=build, needed_bytes=needed, progress=progress)


def test_a_folder_is_built_once(tmp_path):
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write_two(folder)

    for _ in range(3):
        ensure(tmp_path / "m" / "x", build)
    assert len(built) == 1
    assert (tmp_path / "m" / "x" / "a").read_text() == "one"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a").write_text("One"),
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / store.MANIFEST).unlink(),
        lambda folder: (folder / store.MANIFEST).write_text("{"),
    ],
    ids=["changed", "missing", "no manifest", "half a manifest"],
)
def test_a_damaged_folder_is_built_again(tmp_path, damage):
    folder = ensure(tmp_path / "x")
    damage(folder)
    told: list[str] = []
    ensure(folder, progress=told.append)
    assert told
    assert find_damage(folder, "r/1") is None
    assert (folder / "a").read_text() == "one"


def test_another_recipe_builds_again(tmp_path):
    folder = ensure(tmp_path / "x")
    ensure(folder, lambda new: (new / "c").write_text("three"), recipe="r/2")
    assert not (folder / "a").exists()


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        ensure(tmp_path / "x", fail)
    assert not (tmp_path / "x").exists()
    left_over = tmp_path / ".x.killed.partial"
    left_over.mkdir()
    ensure(tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.lock", "x"]


def test_without_space_nothing_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(total=100, used=95, free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match="free some space"):
        ensure(tmp_path / "x", needed=6)
    assert not (tmp_path / "x").exists()


def _build_slowly(folder: Path, counter: Path, started: object) -> None:
    def build(new: Path) -> None:
        with counter.open("a") as file:
            file.write("x")
        started.wait(10)  # type: ignore[attr-defined]
        write_two(new)

    ensure(folder, build)


def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    jobs = [context.Process(target=_build_slowly, args=(tmp_path / "x", tmp_path / "counter", go)) for _ in range(2)]
    for job in jobs:
        job.start()
    go.set()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert (tmp_path / "counter").read_text() == "x"


def test_waiting_for_another_process_ends(tmp_path):
    ensure(tmp_path / "x")
    with store._locked(tmp_path / "x", quiet, 1), pytest.raises(ModelError, match="another process"):
        ensure_folder(
            tmp_path / "x",
            recipe="r/1",
            build=write_two,
            needed_bytes=1,
            progress=quiet,
            lock_timeout_seconds=0.2,
        )


def test_the_tiny_model_is_small_and_has_a_chat_template(tmp_path):
    folder = resolve("demo://tiny-random-llama", tmp_path, quiet)
    assert folder == tmp_path / "models" / "tiny-random-llama"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    assert (
        tokenizer.token_to_id(configuration["eos_token"])
        == json.loads((folder / "config.json").read_text())["eos_token_id"]
    )
    assert "<|im_start|>" in configuration["chat_template"]
    text = "Hello, 42 times: ünïcødé 日本 🙂\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert max(ids) < tiny.VOCABULARY
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tiny_model_is_the_same_each_time(tmp_path):
    first, second = (resolve("demo://tiny-random-llama", tmp_path / name, quiet) for name in "ab")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Path:
    return resolve("demo://smollm2-135m", tmp_path_factory.mktemp("cache"), quiet)


def test_the_demo_model_has_its_turn_end_and_template(smollm):
    configuration = json.loads((smollm / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    config = json.loads((smollm / "config.json").read_text())
    assert configuration["eos_token"] == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"] == 2
    assert "SmolLM" in configuration["chat_template"]
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert config["num_hidden_layers"] == 30


COMPARE_WITH_THE_PACKAGES_OWN_READER = """
import os, sys
import gguf
import numpy as np
from safetensors import safe_open

packaged, made = sys.argv[1:]
source = {tensor.name: tensor for tensor in gguf.GGUFReader(packaged).tensors}

def original(name):
    return gguf.dequantize(source[name].data, source[name].tensor_type)

with safe_open(made, "numpy") as made:
    assert len(made.keys()) == len(source) == 272
    for ours, theirs in (("token_embd", "embed_tokens"), ("blk.3.ffn_down", "layers.3.mlp.down_proj")):
        assert np.array_equal(made.get_tensor(f"model.{theirs}.weight"), original(f"{ours}.weight"))
    # transformers keeps the halves of a head apart where GGUF keeps pairs.
    for ours, theirs, heads in (("attn_q", "q_proj", 9), ("attn_k", "k_proj", 3)):
        kept = original(f"blk.29.{ours}.weight")
        pairs = kept.reshape(heads, 32, 2, 576)
        expected = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(kept.shape)
        assert np.array_equal(made.get_tensor(f"model.layers.29.self_attn.{theirs}.weight"), expected)
print("equal", flush=True)
os._exit(0)
"""


def test_the_demo_models_weights_are_those_of_the_package(smollm):
    """Compared in a process of its own: what the gguf package imports crashes an interpreter that ends."""
    arguments = [str(smollm2._packaged_file()), str(smollm / "model.safetensors")]

    done = subprocess.run(
        [sys.executable, "-c", COMPARE_WITH_THE_PACKAGES_OWN_READER, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.stdout == "equal\n", done.stderr


def test_what_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match="not a GGUF file"):
        GgufFile(tmp_path / "x")


def local(tmp_path: Path, **files: str) -> Path:
    for name, content in files.items():
        (tmp_path / name.replace("_", ".").replace("~", "-")).write_text(content)
    return tmp_path


def test_a_local_folder_is_checked(tmp_path):
    with pytest.raises(ModelUnavailableError, match="does not exist"):
        resolve(str(tmp_path / "none"), tmp_path, quiet)
    with pytest.raises(ModelUnusableError, match=r"config\.json"):
        resolve(str(tmp_path), tmp_path, quiet)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelUnusableError, match="safetensors"):
        resolve(str(tmp_path), tmp_path, quiet)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ModelUnusableError, match=r"two\.safetensors"):
        resolve(str(tmp_path), tmp_path, quiet)
    (tmp_path / "two.safetensors").touch()
    assert resolve(str(tmp_path), tmp_path, quiet) == tmp_path


@pytest.mark.parametrize("uri", ["demo://nothing", "s3://bucket/model"])
def test_unknown_addresses_are_named(tmp_path, uri):
    with pytest.raises(ModelUnavailableError, match=r"nothing|s3://bucket/model"):
        resolve(uri, tmp_path, quiet)


def test_a_hub_model_without_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailableError, match="HF_HUB_OFFLINE"):
        resolve("hf://someone/something@main", tmp_path, quiet)


def test_the_command_prints_json_lines(tmp_path, capsys):
    assert run(argparse.Namespace(uri="demo://tiny-random-llama", cache=tmp_path, link=None)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["progress", "model"]
    assert Path(lines[-1]["path"]).is_dir()
    assert run(argparse.Namespace(uri="demo://nothing", cache=tmp_path, link=None)) == 3
    assert json.loads(capsys.readouterr().out)["event"] == "failed"


def test_resolving_needs_no_torch():
    program = f"import sys, {resolve_module.__name__}, kllm_engine.models.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
