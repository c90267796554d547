"""A folder for all that an engine and its libraries write, for containers whose root is read-only."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_USER = "kllm"

# Triton, FlashInfer, Hugging Face, CUDA and others follow the home directory or the cache directory.
_FOLDERS = {"TMPDIR": "tmp", "XDG_CACHE_HOME": ".cache", "TORCHINDUCTOR_CACHE_DIR": ".cache/torchinductor"}


def use_work_dir(folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Send what this process and its children write beside their own files into a folder.

    A place that the environment names already is kept, so that a cache can lie on a volume that pods share. The home
    directory is not: for a user that the image does not know, the container runtime sets one that cannot be written.

    Raises:
        OSError: the folder cannot be written.
    """
    environment["HOME"] = str(folder)
    # Looked up in the password file else, where such a user is not.
    for name in ("USER", "LOGNAME"):
        environment.setdefault(name, _USER)
    for name, place in _FOLDERS.items():
        Path(environment.setdefault(name, str(folder / place))).mkdir(mode=0o700, parents=True, exist_ok=True)
