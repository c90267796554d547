"""The end of an engine's log, for error messages."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_BYTES = 16_384
_LINES = 20
_ARGUMENT_ERROR = ": error: "


@dataclass(frozen=True)
class EngineLog:
    """Log of one engine.

    Attributes:
        path: where the engine writes; it need not exist yet.
        secret: hidden in what is read, for the engine logs its own arguments.
    """

    path: Path
    secret: str = field(repr=False)

    def last_lines(self) -> str:
        """The last lines; empty when there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        if size > _BYTES:
            # The first line has lost its beginning, perhaps in the middle of the secret.
            text = text.partition("\n")[2]
        return "\n".join(text.replace(self.secret, "(token)").splitlines()[-_LINES:])

    def under(self, message: str) -> str:
        """A message with the last lines under it; for arguments that SGLang refused, its one sentence says it all."""
        lines = self.last_lines()
        _, refused, reason = lines.rpartition("\n")[2].partition(_ARGUMENT_ERROR)
        if refused:
            return f"{message}: SGLang refused its arguments: {reason}; check engineArgs"
        return f"{message}\nlast lines of {self.path}:\n{lines}" if lines else message
