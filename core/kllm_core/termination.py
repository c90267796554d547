"""Why a program of a container ended, where Kubernetes shows it."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

TERMINATION_LOG = Path("/dev/termination-log")
"""Kubernetes' default; what is in it becomes the container's termination message."""

_BYTES = 4096
"""Kubernetes cuts longer messages at their end."""

_GAP = b"\n[...]\n"

_log = structlog.get_logger(__name__)


def tell_why(message: str, path: Path = TERMINATION_LOG) -> None:
    """Write a message there, if that is a file: outside of a container nothing is made.

    Of a message that is too long, the first line and the end remain: that it failed, and the last words of a log.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    except OSError:
        return
    try:
        os.write(descriptor, _shortened(message.encode()))
    except OSError as error:
        _log.warning("the termination message was not written", path=str(path), error=str(error))
    finally:
        os.close(descriptor)


def _shortened(text: bytes) -> bytes:
    if len(text) <= _BYTES:
        return text
    head = text.partition(b"\n")[0][: _BYTES // 2]
    tail = text[-(_BYTES - len(head) - len(_GAP)) :]
    # Half a character at a cut would not be text.
    return head.decode(errors="ignore").encode() + _GAP + tail.decode(errors="ignore").encode()
