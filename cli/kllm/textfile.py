"""Text files that users name: plain or gzipped, pipes too, with lines that have an end."""

from __future__ import annotations

import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)
"""What reading one may raise besides `LineError`."""
_MOST_LINE = 16 << 20


class LineError(ValueError):
    """A line is too long to be one."""


@contextmanager
def lines_of(path: Path) -> Iterator[Iterator[str]]:
    """Lines of UTF-8 with their ends as they are, for the length of the context.

    Raises:
        LineError: one is too long; with its number.
        OSError: or another of `UNREADABLE`.
    """
    # Opened once, since what has been read of a pipe is gone.
    with path.open("rb") as file:
        plain = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        with io.TextIOWrapper(plain, encoding="utf-8", newline="") as lines:
            yield _bounded(lines)


def _bounded(lines: TextIO) -> Iterator[str]:
    for number in itertools.count(1):
        line = lines.readline(_MOST_LINE)
        if not line:
            return
        if len(line) >= _MOST_LINE:
            raise LineError(f"line {number} has more than {_MOST_LINE} characters")
        yield line
