"""What /proc says of the engine's processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ENGINE_TITLE = "sglang::"
_START_TIME = 19
"""Place of the start time in /proc/PID/stat, counted from the state."""


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        state: letter of its state; T is stopped, Z has ended and waits for its parent.
        group: process group.
        title: its command line's first word, which SGLang sets for its own processes.
    """

    pid: int
    state: str
    group: int
    title: str

    @property
    def is_engine_part(self) -> bool:
        """Whether the engine cannot work without it (a scheduler or a detokenizer, not a helper)."""
        return self.title.startswith(_ENGINE_TITLE)

    def __str__(self) -> str:
        return f"{self.title or 'process'} ({self.pid})"


def inspect(pid: int) -> Process | None:
    """One process, or None when it is gone."""
    try:
        # The name in parentheses may contain spaces and parentheses itself.
        _, _, rest = (_PROC / str(pid) / "stat").read_text().rpartition(")")
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, _, group = rest.split()[:3]
    return Process(pid, state, int(group), words[0].decode(errors="replace"))


def age_seconds(pid: int) -> float | None:
    """How long ago a process was forked, to a hundredth of a second; None when it is gone."""
    try:
        _, _, rest = (_PROC / str(pid) / "stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    began = int(rest.split()[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def members(group: int) -> list[Process]:
    """Live processes of a group, by pid."""
    found = (inspect(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    alive = (process for process in found if process is not None and process.group == group and process.state != "Z")
    return sorted(alive, key=lambda process: process.pid)
