"""Files that results are written to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kllm.bench.exceptions import OptionError


def check_file(option: str, path: Path) -> None:
    """Make sure that a file can be written later.

    Raises:
        OptionError: it cannot.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(option, f"{path} cannot be written; name a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(option, f"{path} cannot be written; name another file")


def check_new_file(option: str, path: Path) -> None:
    """Make sure that a file can be made.

    Raises:
        OptionError: it is there already, or cannot be written.
    """
    if path.exists():
        raise OptionError(option, f"{path} is there already; name a new file, or remove it")
    check_file(option, path)


def write_json(path: Path, document: Any) -> None:
    """Readers find the whole document or none; a device or a pipe is written as it is.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(document, indent=1) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
