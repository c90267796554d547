"""Writes down what one control loop decides from."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from kllm_operator.history.moment import Header, Moment
from kllm_operator.history.ticks import Ticks
from kllm_operator.history.writer import Writer

_log = structlog.get_logger(__name__)


class Recorder(Ticks):
    """Records into a file. A context.

    What is there already stays: a file that exists is not written to. When the file cannot be written any more,
    recording ends and the loop goes on.

    Args:
        path: of the file.
        service: name of the service.
        start_seconds: what a start took so far; None is unknown.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, *, service: str, start_seconds: float | None = None) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("x", encoding="utf-8")
        self._writer: Writer | None = Writer(
            self._file, Header("kllm-history", service, round(time.time(), 3), start_seconds=start_seconds)
        )

    def __enter__(self) -> Self:
        """Record."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, moment: Moment) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add(moment)
        except OSError as error:
            self._writer = None
            _log.error("RecordingEnded", path=str(self._path), why=error.strerror)
