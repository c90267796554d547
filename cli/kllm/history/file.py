"""Reads histories from files: JSON lines, plain or gzipped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kllm.textfile import UNREADABLE, LineError, lines_of
from kllm_operator.history.moment import Header, HistoryError, Moment, parse_header, parse_moment

_GAP_SECONDS = 60.0
"""A pause between two ticks from which on it is told: the loop ticks every few seconds."""


class History:
    """A recorded history.

    Attributes:
        notes: what its reader should know.
    """

    def __init__(self, header: Header, moments: tuple[Moment, ...], notes: tuple[str, ...]) -> None:
        self.header, self.moments, self.notes = header, moments, notes


def read_history(path: Path) -> History:
    """Read a file.

    Raises:
        HistoryError: it cannot be read, holds something else, or its time runs backwards; with the line.
    """
    try:
        with lines_of(path) as lines:
            return parse_history(lines)
    except (HistoryError, LineError) as error:
        raise HistoryError(f"{path}: {error}") from error
    except UNREADABLE as error:
        raise HistoryError(f"{path} cannot be read: {error}") from error


def parse_history(lines: Iterable[str]) -> History:
    """The same from lines.

    Raises:
        HistoryError: they are no history.
    """
    header: Header | None = None
    moments: list[Moment] = []
    notes: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if header is None:
                header = parse_header(line)
                continue
            moment = parse_moment(line)
        except HistoryError as error:
            raise HistoryError(f"line {number}: {error}") from error
        if moments:
            notes += _checked(moments[-1], moment, number)
        moments.append(moment)
    if header is None or not moments:
        raise HistoryError("it holds no moments")
    return History(header, tuple(moments), tuple(notes))


def _checked(before: Moment, moment: Moment, number: int) -> list[str]:
    gap = moment.at - before.at
    if gap < 0:
        raise HistoryError(
            f"line {number}: time runs backwards, by {-gap:g} s; was a loop restarted? cut the file there"
        )
    if gap < _GAP_SECONDS:
        return []
    return [f"line {number}: nothing was recorded for {gap:.0f} s before it; what is measured begins anew there"]
