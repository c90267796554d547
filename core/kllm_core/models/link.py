"""A symbolic link to a model's folder, under a name that programs know before the model is there."""

from __future__ import annotations

import contextlib
import errno
import secrets
from pathlib import Path

from kllm_core.models.exceptions import DiskFullError, ModelError


def link_folder(link: Path, folder: Path) -> None:
    """Make `link` point to the folder, in one step: who opens it finds the old folder or the new one.

    Raises:
        ModelError: something else is there, or it cannot be written.
    """
    beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    try:
        if link.exists() and not link.is_symlink():
            raise ModelError(f"--link {link} is no symbolic link: remove it or choose another name")
        link.parent.mkdir(parents=True, exist_ok=True)
        beside.symlink_to(folder.absolute())
        beside.replace(link)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        kind = DiskFullError if error.errno in {errno.ENOSPC, errno.EDQUOT} else ModelError
        raise kind(f"--link {link} cannot be made: {error.strerror}") from error
