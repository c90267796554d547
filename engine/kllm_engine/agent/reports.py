"""Takes the plugin's messages apart: facts and heartbeats stay here, load and requests go to their books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from kllm_engine.agent.changes import Changes
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import LoadBook
from kllm_engine.agent.requests import RequestBook
from kllm_engine.messages import Heartbeat, Hello, Load, Message, Request

_log = structlog.get_logger(__name__)


class PluginReports:
    """What the engine's processes have said of themselves.

    Args:
        clock: seconds; the machine's monotonic clock, as in the messages.

    Attributes:
        hello: facts of the server, None before the first.
        hello_seen: set with the first hello.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        loads: LoadBook,
        requests: RequestBook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance = instance
        self._loads = loads
        self._requests = requests
        self._clock = clock
        self._heartbeats: dict[int, Heartbeat] = {}
        self.hello: Hello | None = None
        self.hello_seen = asyncio.Event()
        self._hellos = Changes()

    def handle(self, message: Message) -> None:
        """Take one message."""
        match message:
            case Hello():
                self.hello = message
                self._heartbeats.setdefault(message.pid, _first_heartbeat(message))
                self.hello_seen.set()
                self._hellos.notify()
                _log.info("engine said hello", pid=message.pid, problems=message.problems)
            case Heartbeat():
                self._heartbeats[message.pid] = message
                self._loads.alive(message.now)
            case Load():
                self._loads.update(message)
            case Request():
                self._requests.update(message, self._instance.incarnation)

    async def next_hello(self, role: str, since: float) -> Hello:
        """The first introduction in a role at or after a moment on the clock of the messages."""
        with self._hellos.subscribe() as told:
            while self.hello is None or self.hello.role != role or self.hello.now < since:
                await told.wait()
                told.clear()
            return self.hello

    def heartbeat_age(self) -> float:
        """Seconds since the last heartbeat, of the process that has been silent longest."""
        now = self._clock()
        return max((now - beat.now for beat in self._heartbeats.values()), default=0.0)

    def loop_age(self) -> float:
        """Seconds since a scheduler began its last iteration, of the one that is behind most."""
        now = self._clock()
        return max((now - beat.now + beat.loop_age for beat in self._heartbeats.values()), default=0.0)


def _first_heartbeat(hello: Hello) -> Heartbeat:
    return Heartbeat(pid=hello.pid, now=hello.now, loops=0, loop_age=0.0)
