"""Which processes belong to a run, in a way that a reused process number cannot confuse.

A run marks the environment of everything it starts, and remembers the session of each child. Processes that overwrite
their own environment (engines set their title there) are found by their session or their parents.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "KLLM_RUN"
_PROC = Path("/proc")
_DEAD_STATES = frozenset({"Z", "X"})


@dataclass(frozen=True)
class ProcessIdentity:
    """A process number with the time of its start, which together are never used twice until the next boot.

    Attributes:
        started: clock ticks since boot.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        stat = _read_stat(self.pid)
        return stat is not None and stat.started == self.started


@dataclass(frozen=True)
class _Stat:
    pid: int
    parent: int
    session: int
    started: int


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a living process; None when there is none of that number."""
    stat = _read_stat(pid)
    return None if stat is None else ProcessIdentity(pid, stat.started)


def members(run_id: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    """Living processes of a run: marked with its id, in a session of its leaders, or descending from one of those.

    Args:
        run_id: value of RUN_VARIABLE in the environment of everything the run started.
        leaders: children of the run that lead a session, dead ones included.
    """
    marker = f"{RUN_VARIABLE}={run_id}".encode()
    processes = {stat.pid: stat for stat in _all() if stat.pid != os.getpid()}
    sessions = {leader.pid for leader in leaders if _leads_still(leader, processes)}
    found = {pid for pid, stat in processes.items() if stat.session in sessions or _is_marked(pid, marker)}
    while grown := {pid for pid, stat in processes.items() if stat.parent in found} - found:
        found |= grown
    return [ProcessIdentity(pid, processes[pid].started) for pid in sorted(found)]


def kill_all(processes: Sequence[ProcessIdentity], *, timeout_seconds: float = 2.0) -> list[ProcessIdentity]:
    """End processes with SIGKILL and wait for their end; returns those that are still there."""
    for process in processes:
        if process.alive:
            _signal(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_seconds
    while remaining := [process for process in processes if process.alive]:
        if time.monotonic() > deadline:
            return remaining
        time.sleep(0.01)
    return []


def _leads_still(leader: ProcessIdentity, processes: dict[int, _Stat]) -> bool:
    """A number stays reserved while its session has members, so only another process of that number means reuse."""
    current = processes.get(leader.pid)
    if current is not None:
        return current.started == leader.started
    # Without its leader a session is ours only if all of its members are younger than the leader was.
    sessions = [stat for stat in processes.values() if stat.session == leader.pid]
    return bool(sessions) and all(stat.started >= leader.started and _is_own(stat.pid) for stat in sessions)


def _is_own(pid: int) -> bool:
    try:
        return (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False


def _is_marked(pid: int, marker: bytes) -> bool:
    try:
        return marker in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or belongs to someone else
        return False


def _all() -> Iterator[_Stat]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _read_stat(int(entry.name))) is not None:
            yield stat


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself; the fields after it may not.
    fields = text[text.rindex(")") + 2 :].split()
    # A process whose first thread is dead keeps its files, and so its locks, until the other threads are dead too.
    if fields[0] in _DEAD_STATES and int(fields[17]) <= 1:
        return None
    return _Stat(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
