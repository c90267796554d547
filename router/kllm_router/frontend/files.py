"""Files that change while the router runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_Stamp = tuple[int, int, int] | None


def changes(*paths: Path) -> Iterator[bool]:
    """Whether any file is another one than at the last look; a Secret's become others by their links.

    The first look says that they are, since what was read before it may be old.
    """
    before: list[_Stamp] | None = None
    while True:
        yield (stamps := [_stamp(path) for path in paths]) != before
        before = stamps


def _stamp(path: Path) -> _Stamp:
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_ino, told.st_size
