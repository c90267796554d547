"""What can go wrong where instances live.

SubstrateError
├── RunDirectoryError    the run directory cannot be used; the message says how to get one that can
├── AlreadyRunningError  another living process owns the run directory
├── ChildFailedError     a process ended, or said that it failed, or was not ready in time
└── StepRefusedError     the step is not possible for this instance now; nothing was changed
"""

from __future__ import annotations

from pathlib import Path


class SubstrateError(Exception):
    """Base of all of them; its text is for people."""


class RunDirectoryError(SubstrateError):
    """The run directory cannot be used."""


class AlreadyRunningError(SubstrateError):
    """Another living process owns the run directory.

    Attributes:
        pid: of that process, as far as it is known.
    """

    def __init__(self, message: str, *, pid: int | None) -> None:
        self.pid = pid
        super().__init__(message)


class ChildFailedError(SubstrateError):
    """A process that was to serve does not.

    Attributes:
        name: of the process.
        why: one sentence.
        log: its log file.
        log_tail: the last lines of that file.
    """

    def __init__(self, name: str, why: str, *, log: Path, log_tail: tuple[str, ...]) -> None:
        self.name = name
        self.why = why
        self.log = log
        self.log_tail = log_tail
        super().__init__(f"{name} {why}")


class StepRefusedError(SubstrateError):
    """The step is not possible for this instance now.

    Attributes:
        reason: CamelCase, for conditions and metrics.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)
