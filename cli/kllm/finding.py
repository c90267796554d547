"""Which services are up on this machine, and in which state `kllm up` left the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kllm_operator.substrate.exceptions import RunDirectoryError
from kllm_operator.substrate.identity import ProcessIdentity, identify
from kllm_operator.substrate.rundir import RunDirectory, runs_directory, service_names

_PROC = Path("/proc")
_START = "kllm up -f FILE"


@dataclass(frozen=True)
class Lost:
    """A service that runs, and whose state cannot be read.

    Attributes:
        holder: the process that holds its lock.
    """

    service: str
    holder: ProcessIdentity

    @property
    def is_up_command(self) -> bool:
        """Whether the holder is a `kllm up`, which SIGTERM ends with all that it started."""
        try:
            return b"up" in (_PROC / str(self.holder.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return False

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"service {self.service!r} is up (pid {self.holder.pid}), but {RunDirectory(self.service).state_file} "
            f"is gone or cannot be read, so no more is known; stop it with: kllm down {self.service}"
        )


@dataclass(frozen=True)
class Found:
    """Services of this user.

    Attributes:
        up: those that run.
        lost: those that run, and whose state cannot be read.
        killed: those whose `kllm up` was killed, so that something may be left.
        others: those that are up and were not looked for.
    """

    up: tuple[str, ...]
    lost: tuple[Lost, ...]
    killed: tuple[str, ...]
    others: tuple[str, ...] = ()

    def nothing(self, name: str | None) -> str:
        """Why there is nothing to look at, with what helps."""
        if name is None:
            return f"nothing is up on this machine; start it with: {_START}"
        others = f" (up: {', '.join(self.others)})" if self.others else ""
        return f"service {name!r} is not up on this machine{others}; start it with: {_START}"


def find(name: str | None = None) -> Found:
    """Find all services, or the one of that name.

    Raises:
        RunDirectoryError: the folder that they would be in cannot be read.
    """
    try:
        names = service_names()
    except OSError as error:
        raise RunDirectoryError(
            f"{runs_directory()} cannot be read: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    up: list[str] = []
    others: list[str] = []
    lost: list[Lost] = []
    killed: list[str] = []
    for service in names:
        run = RunDirectory(service)
        if name not in {None, service}:
            others += [service] if run.is_owned else []
        elif run.is_owned:
            up.append(service)
        elif run.read_state() is not None:
            killed.append(service)
        elif (holder := lock_holder(run)) is not None:
            lost.append(Lost(service, holder))
    return Found(tuple(up), tuple(lost), tuple(killed), tuple(others))


def address_of_the_one() -> tuple[str | None, str]:
    """Base address of the router of the only service that is up; without one, why."""
    try:
        found = find()
    except RunDirectoryError as error:
        return None, str(error)
    if len(found.up) > 1:
        return None, f"several services are up ({', '.join(found.up)}); choose one with --url"
    if not found.up:
        return None, found.lost[0].text if found.lost else found.nothing(None)
    state = RunDirectory(found.up[0]).read_state()
    if state is None or state.url is None or state.phase != "Serving":
        phase = "stopping" if state is not None and state.phase == "Stopping" else "still starting"
        return None, f"service {found.up[0]!r} is {phase}; see: kllm status"
    return state.url, ""


def lock_holder(run: RunDirectory) -> ProcessIdentity | None:
    """The process that holds the service's lock; None when there is none.

    It is looked up and not tried: whoever tries a lock has it for a moment, in which `kllm up` would be refused.
    """
    lock = run.lock_file.resolve()
    for process in _PROC.iterdir():
        if process.name.isdigit() and any(_is_locked(process, fd) for fd in _descriptors(process, lock)):
            return identify(int(process.name))
    return None


def _descriptors(process: Path, file: Path) -> Iterator[str]:
    try:
        for entry in (process / "fd").iterdir():
            if entry.readlink() == file:
                yield entry.name
    except OSError:  # it ended, or belongs to someone else
        return


def _is_locked(process: Path, descriptor: str) -> bool:
    try:
        return "FLOCK" in (process / "fdinfo" / descriptor).read_text(encoding="ascii")
    except OSError:
        return False
