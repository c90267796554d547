"""Writes histories: JSON lines."""

from __future__ import annotations

import json
from typing import TextIO

from kllm_operator.history.moment import Header, Moment, compact


class Writer:
    """Writes a history line by line, so that what is there is whole at any time.

    Attributes:
        bytes: that it has written.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, file: TextIO, header: Header) -> None:
        self.bytes = 0
        self._file = file
        self.add_line(line(compact(header) | {"kind": header.kind, "version": header.version}))

    def add(self, moment: Moment) -> None:
        """One more tick."""
        self.add_line(line(compact(moment)))

    def add_line(self, text: str) -> None:
        """The same, of what `line` made."""
        self._file.write(text)
        self._file.flush()
        self.bytes += len(text)


def line(document: object) -> str:
    """One line of a history; ASCII, so that its length is its size."""
    return json.dumps(document, separators=(",", ":")) + "\n"
