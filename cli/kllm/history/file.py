"""Reads histories from files: JSON lines, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from kllm_operator.history.moment import Header, HistoryError, Moment, parse_header, parse_moment

_MOST_LINE = 16 << 20
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
        # Opened once, since what has been read of a pipe is gone.
        with path.open("rb") as file:
            plain = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
            with io.TextIOWrapper(plain, encoding="utf-8") as lines:
                return parse_history(_bounded(lines))
    except HistoryError as error:
        raise HistoryError(f"{path}: {error}") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
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


def _bounded(lines: TextIO) -> Iterator[str]:
    while line := lines.readline(_MOST_LINE):
        if len(line) >= _MOST_LINE:
            raise HistoryError(f"a line has more than {_MOST_LINE} characters")
        yield line
