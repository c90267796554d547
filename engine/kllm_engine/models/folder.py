"""A folder that holds a model."""

from __future__ import annotations

import json
from pathlib import Path

from kllm_core.models.exceptions import ModelNotFoundError, ModelUnusableError


def check_folder(folder: Path) -> Path:
    """Refuse a folder that SGLang would fail on much later.

    Raises:
        ModelNotFoundError: it does not exist.
        ModelUnusableError: it lacks config or weights.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"model folder {folder} does not exist")
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
