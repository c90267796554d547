"""The zygote: a single-threaded process that has imported SGLang and forks a server for each connection.

It must stay free of threads and of gRPC: a fork copies only the calling thread, with every lock as it stood.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from kllm_engine.start.lineage import adopt_orphans, follow_parent_in_every_fork
from kllm_engine.start.protocol import (
    MAXIMUM_PACKET_BYTES,
    Event,
    Exited,
    Fork,
    Refused,
    Started,
    decode_request,
    encode,
)
from kllm_engine.start.recipe import Recipe, SglangRecipe

_log = structlog.get_logger(__name__)

_BACKLOG = 128


class _Connection:
    """One agent's connection and its server, if one was forked."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel: socket.socket | None = channel
        self.pid: int | None = None
        self.name = ""

    def send(self, event: Event) -> None:
        """Tell the agent; one that has gone is noticed by its end of file."""
        if self.channel is None:
            return
        try:
            self.channel.send(encode(event))
        except OSError as error:
            _log.warning(
                "an event was not delivered", server=self.name, event_type=type(event).__name__, error=str(error)
            )


class _Zygote:
    """The serve loop."""

    def __init__(self, listener: socket.socket, recipe: Recipe) -> None:
        self._listener = listener
        self._recipe = recipe
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._stopping = False

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; then kill every server."""
        self._watch(self._listener, self._accept)
        self._watch(self._wakeup_reader, self._on_signal)
        self._wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        # A signal that came before its handler stood has left no wake-up.
        self._reap()
        while not self._stopping:
            for key, _ in self._selector.select():
                key.data()
        for connection in list(self._connections):
            self._kill(connection)

    def _watch(self, channel: socket.socket, action: Callable[[], None]) -> None:
        channel.setblocking(False)
        self._selector.register(channel, selectors.EVENT_READ, action)

    def _note_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._stopping = True

    def _on_signal(self) -> None:
        try:
            while self._wakeup_reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        self._reap()

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if _peer_user(channel) != os.geteuid():
            _log.warning("a connection of another user was refused")
            channel.close()
            return
        connection = _Connection(channel)
        self._connections.add(connection)
        self._watch(channel, lambda: self._receive(connection))

    def _receive(self, connection: _Connection) -> None:
        if connection.channel is None:
            return
        try:
            packet = connection.channel.recv(MAXIMUM_PACKET_BYTES + 1)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._disconnect(connection)
            return
        try:
            request = decode_request(packet)
        except msgspec.DecodeError as error:
            connection.send(Refused(message=f"not a request: {error}"))
            return
        if not isinstance(request, Fork):
            self._kill(connection)
        elif connection.pid is not None:
            connection.send(Refused(message="this connection has its server already; one connection is one server"))
        else:
            self._fork(connection, request)

    def _fork(self, connection: _Connection, request: Fork) -> None:
        connection.name = request.name
        try:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            connection.send(Refused(message=f"log {request.log}: {error.strerror}"))
            return
        try:
            pid = os.fork()
        except OSError as error:
            os.close(log)
            connection.send(Refused(message=f"fork: {error.strerror}"))
            return
        if pid == 0:
            self._be_server(request, log)
        os.close(log)
        connection.pid = pid
        connection.send(Started(pid=pid))
        _log.info("server started", server=request.name, pid=pid)

    def _be_server(self, request: Fork, log: int) -> NoReturn:
        status = 1
        try:
            os.setsid()
            self._forget_parent()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(null)
            os.close(log)
            os.environ.update(request.env)
            self._recipe.run(request.args)
            status = 0
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:  # noqa: BLE001  the fork must never return into the zygote's loop
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def _forget_parent(self) -> None:
        """In the child: the zygote's signals and sockets are not the server's."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for channel in (self._listener, self._wakeup_reader, self._wakeup_writer):
            channel.close()
        for connection in self._connections:
            if connection.channel is not None:
                connection.channel.close()

    def _disconnect(self, connection: _Connection) -> None:
        if connection.channel is not None:
            self._selector.unregister(connection.channel)
            connection.channel.close()
            connection.channel = None
        if connection.pid is None:
            self._connections.discard(connection)
        else:
            self._kill(connection)

    def _kill(self, connection: _Connection) -> None:
        if connection.pid is not None:
            _kill_group(connection.pid)

    def _reap(self) -> None:
        servers = {connection.pid: connection for connection in self._connections if connection.pid is not None}
        while (pid := _next_ended()) is not None:
            connection = servers.get(pid)
            if connection is not None:
                # The first process is still a zombie here, so that its id cannot name another group yet.
                _kill_group(pid)
            _, wait_status = os.waitpid(pid, 0)
            if connection is not None:
                self._conclude(connection, os.waitstatus_to_exitcode(wait_status))

    def _conclude(self, connection: _Connection, status: int) -> None:
        _log.info("server ended", server=connection.name, pid=connection.pid, status=status)
        connection.pid = None
        connection.send(Exited(status=status))
        self._disconnect(connection)


def serve(socket_path: Path, recipe: Recipe | None = None, *, model: str | None = None) -> int:
    """Listen at `socket_path`, import, then fork a server for each connection until SIGTERM.

    The socket listens before the imports begin; requests that come meanwhile wait. When the imports are done, one line
    of JSON on stdout says so: {"event":"ready","seconds":...}.

    Args:
        socket_path: Unix socket to listen on.
        recipe: what servers are; SGLang's by default.
        model: path of the model that SGLang's servers will all load, if that is known.

    Returns:
        The exit code: 0 after SIGTERM or SIGINT.
    """
    started = time.monotonic()
    chosen = recipe if recipe is not None else SglangRecipe(model)
    socket_path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(socket_path))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        try:
            follow_parent_in_every_fork()
            adopt_orphans()
            chosen.prepare()
            _announce({"event": "ready", "seconds": round(time.monotonic() - started, 3)})
            _Zygote(listener, chosen).run()
        finally:
            socket_path.unlink(missing_ok=True)
    return 0


def _announce(event: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _peer_user(channel: socket.socket) -> int:
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _next_ended() -> int | None:
    """A child that has ended and is not reaped yet; orphans of dead servers are children too."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None


def _kill_group(pid: int) -> None:
    """Kill a server's process group; before its setsid there is none, and then the process itself."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
