"""From a model address to a local folder that SGLang can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kllm_core.models import hub
from kllm_core.models.exceptions import ModelNotFoundError, WrongAddressError
from kllm_engine.models import smollm2, tiny
from kllm_engine.models.folder import check_folder
from kllm_engine.models.store import Progress, ensure_folder

_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What SGLang loads of a repository."""


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
        return check_folder(Path(uri).expanduser().absolute())
    if scheme == "demo":
        return _demo(rest, cache_dir / "models", progress)
    if scheme == "hf":
        return check_folder(hub.fetch(rest, cache_dir=cache_dir / "models", patterns=_PATTERNS, progress=progress))
    raise WrongAddressError(f"unknown model address {uri!r}: use demo://NAME, hf://ORG/NAME[@REVISION], or a folder")


def _demo(name: str, models: Path, progress: Progress) -> Path:
    demo = _DEMOS.get(name)
    if demo is None:
        raise ModelNotFoundError(f"unknown demo model {name!r}; there are {', '.join(_DEMOS)}")

    def build(folder: Path) -> None:
        progress(f"{name}: {demo.message}")
        demo.build(folder)

    return ensure_folder(
        models / name, recipe=demo.recipe, build=build, needed_bytes=demo.needed_bytes, progress=progress
    )
