"""The run directory of one service on one machine: who owns it, and what a killed run left there."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kllm_core.authentication import create_token_file
from kllm_operator.substrate.exceptions import AlreadyRunningError, RunDirectoryError
from kllm_operator.substrate.identity import ProcessIdentity, identify, kill_all, members

STATE_VERSION = 1
_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its closing zero
_LOCK = "lock"
_LOGS = "logs"
_STATE = "state.json"


@dataclass(frozen=True)
class ProcessRecord:
    """One child in state.json.

    Attributes:
        id: instance id, or `zygote`, `router-0`.
        kind: prefill, decode, router or zygote.
    """

    id: str
    kind: str
    pid: int
    started: int
    log: str

    @property
    def identity(self) -> ProcessIdentity:
        """Number and start time."""
        return ProcessIdentity(self.pid, self.started)


@dataclass(frozen=True)
class RunState:
    """state.json: what `kllm status` and `kllm down` know of a run, and what a later run cleans up after.

    Attributes:
        run_id: marks the environment of all its processes.
        pid: of the owner (`kllm up`).
        started: its start in clock ticks since boot.
        started_at: seconds since 1970.
        phase: Starting, Serving or Stopping.
        url: base address of the router; None until it listens.
        grpc: host:port of the router's gRPC server, if it has one.
    """

    service: str
    run_id: str
    pid: int
    started: int
    started_at: float
    model: str
    phase: str = "Starting"
    url: str | None = None
    grpc: str | None = None
    processes: tuple[ProcessRecord, ...] = field(default=())
    version: int = STATE_VERSION

    @property
    def owner(self) -> ProcessIdentity:
        """The owner's number and start time."""
        return ProcessIdentity(self.pid, self.started)

    def to_json(self) -> str:
        """As it stands in the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else, or of another version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields["version"] != STATE_VERSION:
                raise ValueError(f"version {fields['version']!r} is not {STATE_VERSION}")
            processes = tuple(ProcessRecord(**record) for record in fields.pop("processes"))
            return cls(**fields, processes=processes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a run's state: {error!r}") from error


def runs_directory() -> Path:
    """Where the run directories of this user are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kllm"
    return Path(tempfile.gettempdir()) / f"kllm-{os.geteuid()}"


def service_names() -> list[str]:
    """Services that have a run directory, running or not."""
    try:
        return sorted(entry.name for entry in runs_directory().iterdir() if (entry / _LOCK).is_file())
    except FileNotFoundError:
        return []


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that readers see the old or the new text, never a part."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class RunDirectory:
    """A service's run directory. Reading needs nothing; writing needs `claim`."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.path = runs_directory() / service
        self.token_file = self.path / "token"
        self.fleet_file = self.path / "fleet.json"
        self.control_file = self.path / "control.json"
        self.state_file = self.path / _STATE
        self.lock_file = self.path / _LOCK
        self.zygote_socket = self.path / "zygote.sock"
        self._lock: int | None = None
        self._state: RunState | None = None

    def log_file(self, name: str) -> Path:
        """Log of one process."""
        return self.path / _LOGS / f"{name}.log"

    def remove_logs(self, name: str) -> None:
        """Remove the logs of an instance that is gone: its agent's and its engine's."""
        for log in (self.log_file(name), self.log_file(f"{name}.engine")):
            log.unlink(missing_ok=True)

    def read_state(self) -> RunState | None:
        """State of the run that is there or was killed; None when there is none or it cannot be read."""
        try:
            return RunState.from_json(self.state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @property
    def is_owned(self) -> bool:
        """Whether a living process runs the service from it."""
        state = self.read_state()
        return state is not None and state.owner.alive

    def claim(self, *, longest_socket_name: str = "") -> list[ProcessIdentity]:
        """Own the directory until `release`, after making it and ending what a killed run left.

        Args:
            longest_socket_name: of the sockets that will be made in it.

        Returns:
            The processes that a killed run had left.

        Raises:
            AlreadyRunningError: a living process owns it.
            RunDirectoryError: it belongs to someone else, is open to others, or its path is too long.
        """
        for name in (self.zygote_socket.name, longest_socket_name):
            self._check_socket_path(name)
        for directory in (self.path.parent, self.path, self.path / _LOGS):
            _make_private(directory)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT, 0o600)
        if not _try_lock(descriptor):
            os.close(descriptor)
            state = self.read_state()
            pid = state.pid if state else None
            where = f" at {state.url}" if state and state.url else ""
            raise AlreadyRunningError(
                f"service {self.service!r} is already up{where}" + (f" (pid {pid})" if pid else ""), pid=pid
            )
        self._lock = descriptor
        try:
            return self.clean()
        except BaseException:
            self.release()
            raise

    def begin(self, *, model: str, now: float) -> RunState:
        """Write the first state of a new run and its token. Needs `claim`."""
        identity = identify(os.getpid())
        if identity is None:
            raise RunDirectoryError("/proc does not show this process; kllm needs it to tell its processes from others")
        state = RunState(self.service, secrets.token_hex(16), identity.pid, identity.started, now, model)
        self._write(state)
        create_token_file(self.token_file)
        return state

    def update(self, **changes: Any) -> None:
        """Change fields of the state. Needs `begin`."""
        if self._state is not None:
            self._write(replace(self._state, **changes))

    def clean(self) -> list[ProcessIdentity]:
        """End what is left of the last run and remove its files; logs stay. Needs `claim`.

        Returns:
            The processes that had to be ended.
        """
        state = self._state or self.read_state()
        left: list[ProcessIdentity] = []
        if state is not None:
            left = members(state.run_id, [record.identity for record in state.processes])
            if stuck := kill_all(left):
                numbers = ", ".join(str(process.pid) for process in stuck)
                raise RunDirectoryError(f"processes {numbers} of service {self.service!r} do not end")
        for entry in self.path.iterdir():
            if entry.name not in {_LOCK, _LOGS} and not entry.is_dir():
                entry.unlink(missing_ok=True)
        self._state = None
        return left

    def release(self) -> None:
        """Give the directory up. The lock file stays: removing it would let two owners hold two files of that name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, state: RunState) -> None:
        write_atomically(self.state_file, state.to_json())
        self._state = state

    def _check_socket_path(self, name: str) -> None:
        length = len(os.fsencode(self.path / name))
        if length > _SOCKET_PATH_BYTES:
            raise RunDirectoryError(
                f"{self.path / name} has {length} bytes, and a socket's path can have {_SOCKET_PATH_BYTES}: "
                "give the service a shorter metadata.name, or set XDG_RUNTIME_DIR to a shorter folder"
            )


def tail(path: Path, lines: int = 20, *, limit: int = 65536) -> tuple[str, ...]:
    """The last lines of a log; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            text = file.read(limit).decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(directory: Path) -> None:
    """Make a directory of mode 0700, or see that an existing one is ours and closed to others."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} cannot be made: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"{directory} is not a directory; remove it")
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"{directory} belongs to user {status.st_uid}, not to you ({os.geteuid()}); set XDG_RUNTIME_DIR"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise RunDirectoryError(f"{directory} is open to other users; run: chmod 700 {directory}")
