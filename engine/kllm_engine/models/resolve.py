"""From a model address to a local folder that SGLang can load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kllm_engine.models import hub, smollm2, tiny
from kllm_engine.models.exceptions import ModelUnavailableError, ModelUnusableError
from kllm_engine.models.store import Progress, ensure_folder


@dataclass(frozen=True)
class _Demo:
    recipe: str
    build: Callable[[Path], None]
    needed_bytes: int
    message: str


_DEMOS = {
    "smollm2-135m": _Demo(
        smollm2.RECIPE, smollm2.build, smollm2.NEEDED_BYTES, "converting SmolLM2-135M-Instruct, once, a few seconds"
    ),
    "tiny-random-llama": _Demo(tiny.RECIPE, tiny.build, tiny.NEEDED_BYTES, "making a tiny random model"),
}


def resolve(uri: str, cache_dir: Path, progress: Progress) -> Path:
    """Make a model available and return its folder.

    Args:
        uri: demo://NAME, hf://ORG/NAME[@REVISION], or a folder.
        cache_dir: kLLM's cache; models go into its folder `models`.
        progress: told what takes time, for people.

    Raises:
        ModelError: it cannot be had, or cannot be used; the message says what to do.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return _check(Path(uri).expanduser().absolute())
    if scheme == "demo":
        return _demo(rest, cache_dir / "models", progress)
    if scheme == "hf":
        repository, _, revision = rest.partition("@")
        return _check(hub.fetch(repository, revision or None, cache_dir=cache_dir / "models", progress=progress))
    raise ModelUnavailableError(
        f"unknown model address {uri!r}: use demo://NAME, hf://ORG/NAME[@REVISION], or a folder"
    )


def _demo(name: str, models: Path, progress: Progress) -> Path:
    demo = _DEMOS.get(name)
    if demo is None:
        raise ModelUnavailableError(f"unknown demo model {name!r}; there are {', '.join(_DEMOS)}")

    def build(folder: Path) -> None:
        progress(f"{name}: {demo.message}")
        demo.build(folder)

    return ensure_folder(
        models / name, recipe=demo.recipe, build=build, needed_bytes=demo.needed_bytes, progress=progress
    )


def _check(folder: Path) -> Path:
    """Refuse a folder that SGLang would fail on much later."""
    if not folder.is_dir():
        raise ModelUnavailableError(f"model folder {folder} does not exist")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise ModelUnusableError(f"{folder} has no config.json: it is no model folder") from error
    except ValueError as error:
        raise ModelUnusableError(f"{folder}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ModelUnusableError(f"{folder}/config.json names no architectures")
    missing = _missing_weights(folder)
    if missing:
        raise ModelUnusableError(f"{folder} lacks weights: {missing}")
    return folder


def _missing_weights(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            needed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{index.name} is damaged"
        return ", ".join(name for name in needed if not (folder / name).is_file())
    return "" if any(folder.glob("*.safetensors")) else "no *.safetensors file"
