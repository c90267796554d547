"""Where models are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(given: Path | None) -> Path:
    """The given one, else the user's cache directory."""
    if given is not None:
        return given.absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "kllm"
