"""Random deaths of instances, each time the fleet is whole."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from engines.service_under_test import Service
from faults.gated_instance import server_pid

from kllm_engine.agent.processes import members

_POLL_SECONDS = 0.25
_WHOLE_SECONDS = 120.0


@dataclass(frozen=True)
class Kill:
    """One death.

    Attributes:
        at: seconds since the run began.
        part: what was killed: agent, scheduler, detokenizer or server.
        whole_seconds: until the fleet was whole again.
    """

    at: float
    instance: str
    part: str
    whole_seconds: float | None


class Kills:
    """Kills one part of one instance again and again, never the last one of a role.

    Args:
        service: a `kllm up` that replaces what dies.
        whole: waits for nothing and says whether all instances serve.
        pause: mean seconds between a whole fleet and the next death.
    """

    def __init__(
        self, service: Service, *, whole: Callable[[], Awaitable[bool]], rng: random.Random, pause: float
    ) -> None:
        self.done: list[Kill] = []
        self._service = service
        self._whole = whole
        self._rng = rng
        self._pause = pause

    async def run(self) -> None:
        """Until cancelled."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause)
            part, instance, pid = self._choose()
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            self.done.append(Kill(round(at - began, 1), instance, part, await self._until_whole(at)))

    def document(self) -> list[dict[str, object]]:
        """For JSON."""
        return [asdict(kill) for kill in self.done]

    async def _until_whole(self, since: float) -> float | None:
        # The router needs a moment to hear of it; before that the fleet still looks whole.
        await asyncio.sleep(1.0)
        while not await self._whole():
            if time.monotonic() - since > _WHOLE_SECONDS:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        return round(time.monotonic() - since, 2)

    def _choose(self) -> tuple[str, str, int]:
        pids = self._service.pids()
        instances = sorted(name for name in pids if "-prefill-" in name or "-decode-" in name)
        instance = self._rng.choice(instances)
        parts = {"agent": pids[instance]}
        for process in members(server_pid(self._service.run / "logs" / "zygote.log", instance)):
            title = process.title.removeprefix("sglang::").split("_")[0]
            parts.setdefault(title if title in {"scheduler", "detokenizer"} else "server", process.pid)
        part = self._rng.choice(sorted(parts))
        return part, instance, parts[part]
