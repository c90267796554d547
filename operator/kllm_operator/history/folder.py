"""Histories of all services of a cluster in one folder, which grows no further than it may."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import structlog

from kllm_operator.history.moment import Header, Moment, compact
from kllm_operator.history.ticks import Ticks
from kllm_operator.history.writer import Writer, line

_SUFFIX = ".jsonl"
_HEADER_BYTES = 512
"""More than a header has: names of services and namespaces are bounded."""

_log = structlog.get_logger(__name__)


@dataclass
class _Open:
    """A file that is being written."""

    path: Path
    file: TextIO
    writer: Writer


class HistoryFolder:
    """Files of at most so many bytes each, and of all together; the oldest go first. For one event loop.

    Each file is a history by itself, with a header: a new one begins with each leader, and when one is full. What is
    there of another process stays until its turn comes.

    Args:
        path: of the folder, which is made when it is needed.
        most_bytes: of all files together.
        file_bytes: of one file.
        wall: seconds since 1970.
    """

    def __init__(self, path: Path, *, most_bytes: int, file_bytes: int, wall: Callable[[], float] = time.time) -> None:
        self.file_bytes = min(file_bytes, most_bytes)
        self._path = path
        self._most_bytes = most_bytes
        self._wall = wall
        self._open: dict[Path, _Open] = {}
        self._held: int | None = None

    def service(self, namespace: str, name: str) -> ServiceHistory:
        """The history of one service."""
        return ServiceHistory(self, namespace, name)

    def begin(self, namespace: str, name: str) -> _Open:
        """A new file.

        Raises:
            OSError: it cannot be made.
        """
        now = self._wall()
        stamp = dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y%m%dT%H%M%S.%f")
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"{namespace}.{name}.{stamp}{_SUFFIX}"
        file = path.open("x", encoding="utf-8")
        try:
            writer = Writer(file, Header("kllm-history", f"{namespace}/{name}", round(now, 3)))
        except OSError:
            file.close()
            raise
        made = self._open[path] = _Open(path, file, writer)
        self.wrote(writer.bytes)
        return made

    def end(self, opened: _Open) -> None:
        """Write no more to a file."""
        del self._open[opened.path]
        with contextlib.suppress(OSError):
            opened.file.close()

    def wrote(self, size: int) -> None:
        """So many bytes were written."""
        if self._held is not None:
            self._held += size

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be written, once the oldest files that nobody writes have gone.

        Raises:
            OSError: it cannot be known.
        """
        if self._held is not None and self._held + size <= self._most_bytes:
            return True
        sizes = {path: path.stat() for path in self._path.glob(f"*{_SUFFIX}")} if self._path.is_dir() else {}
        held = sum(each.st_size for each in sizes.values())
        for path in sorted(sizes.keys() - self._open.keys(), key=lambda each: (sizes[each].st_mtime, each.name)):
            if held + size <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            held -= sizes[path].st_size
        self._held = held
        return held + size <= self._most_bytes


class ServiceHistory(Ticks):
    """Writes down what the control loop of one service decides from.

    What cannot be written is lost: it is said once, and the loop goes on.
    """

    def __init__(self, folder: HistoryFolder, namespace: str, name: str) -> None:
        super().__init__()
        self._folder, self._namespace, self._name = folder, namespace, name
        self._opened: _Open | None = None
        self._problem = ""

    def close(self) -> None:
        """Write no more."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._folder.end(opened)

    def _keep(self, moment: Moment) -> None:
        text = line(compact(moment))
        try:
            problem = "" if self._add(text) else "the files of services that are recorded fill the folder"
        except OSError as error:
            self.close()
            problem = error.strerror or str(error)
        if problem and problem != self._problem:
            _log.error("HistoryNotWritten", namespace=self._namespace, service=self._name, why=problem)
        self._problem = problem

    def _add(self, text: str) -> bool:
        if self._opened is not None and self._opened.writer.bytes + len(text) > self._folder.file_bytes:
            self.close()
        if not self._folder.has_room(len(text) + _HEADER_BYTES):
            return False
        if self._opened is None:
            self._opened = self._folder.begin(self._namespace, self._name)
        self._opened.writer.add_line(text)
        self._folder.wrote(len(text))
        return True
