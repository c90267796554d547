"""Writes down what one control loop decides from."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from kllm_operator.fleet.levels import LevelReport
from kllm_operator.history.moment import Header, Moment
from kllm_operator.history.writer import Writer
from kllm_operator.loop.report import Report

_log = structlog.get_logger(__name__)


class Recorder:
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
        self._path = path
        self._file = path.open("x", encoding="utf-8")
        self._writer: Writer | None = Writer(
            self._file, Header("kllm-history", service, round(time.time(), 3), start_seconds=start_seconds)
        )
        self._levels: list[LevelReport] = []

    def __enter__(self) -> Self:
        """Record."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def hear(self, report: LevelReport) -> None:
        """A router has told something."""
        self._levels.append(report)

    def publish(self, report: Report, *, complete: bool) -> None:
        """A tick has ended.

        Args:
            report: of the loop.
            complete: no router is silent.
        """
        levels, self._levels = tuple(self._levels), []
        if self._writer is None:
            return
        try:
            self._writer.add(moment_of(report, levels, complete=complete))
        except OSError as error:
            self._writer = None
            _log.error("RecordingEnded", path=str(self._path), why=error.strerror)


def moment_of(report: Report, levels: tuple[LevelReport, ...], *, complete: bool) -> Moment:
    """A tick as it is written down.

    Args:
        report: of the loop.
        levels: what routers have told since the tick before.
        complete: no router is silent.
    """
    seen = report.snapshot
    return Moment(seen.fleet.taken_at, report.desired, seen.observed, dict(report.told), levels, complete=complete)
