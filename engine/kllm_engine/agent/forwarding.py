"""Copies the engine's log to a stream as it grows: what `kubectl logs` shows."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from pathlib import Path
from typing import BinaryIO

import structlog

_POLL_SECONDS = 0.25
_READ_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16
_KEPT_BYTES = 1 << 20
"""What stays in the file behind what was copied, for the message of an engine that fails."""

_FREED_BYTES = 8 << 20
"""The file may lie in memory: its beginning is given back whenever so much of it was copied."""

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)

_log = structlog.get_logger(__name__)


class LogForwarder:
    """Follows one file, which need not exist yet.

    Args:
        path: of the log.
        secret: hidden in what is copied.
        out: takes whole lines; may block, as it is written to by a thread.
    """

    def __init__(self, path: Path, *, secret: str, out: BinaryIO) -> None:
        self._path = path
        self._secret = secret.encode()
        self._out = out
        self._read_to = 0
        self._freed_to = 0
        self._rest = b""
        # A thread that copies cannot be cancelled with the task that waits for it.
        self._lock = threading.Lock()

    async def run(self) -> None:
        """Copy until cancelled; what was written by then is copied to its end."""
        try:
            while True:
                if not await asyncio.to_thread(self.copy):
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            while self.copy():
                pass

    def copy(self) -> bool:
        """Copy what is there, up to a bound; whether there may be more."""
        try:
            with self._lock, self._path.open("r+b", buffering=0) as file:
                file.seek(self._read_to)
                read = file.read(_READ_BYTES)
                self._read_to += len(read)
                self._write(self._rest + read)
                self._free(file.fileno())
        except FileNotFoundError:
            return False
        return len(read) == _READ_BYTES

    def _write(self, text: bytes) -> None:
        end = text.rfind(b"\n") + 1
        if end == 0 and len(text) > _LONGEST_LINE:
            end = len(text)
        self._rest = text[end:]
        if end:
            self._out.write(text[:end].replace(self._secret, b"(token)"))
            self._out.flush()

    def _free(self, descriptor: int) -> None:
        """Give back the room of what was copied; the engine's own place in the file is not touched."""
        until = self._read_to - _KEPT_BYTES
        if until - self._freed_to < _FREED_BYTES:
            return
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        self._freed_to, beginning = until, self._freed_to
        if _libc.fallocate(descriptor, mode, ctypes.c_long(beginning), ctypes.c_long(until - beginning)) != 0:
            error = ctypes.get_errno()
            _log.warning("the log's room cannot be given back", path=str(self._path), error=os.strerror(error))
