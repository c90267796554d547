"""All that is heard of one service: its agents and its routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kllm_core.objectives import Role
from kllm_operator.fleet.agents import Agents
from kllm_operator.fleet.levels import LevelReport, Levels, LevelSettings
from kllm_operator.fleet.routers import follow_router
from kllm_operator.fleet.told import Told
from kllm_operator.plan.demand import Forecast, Stages


class FleetWatch:
    """Follows the agents and routers of one service. Implements `kllm_operator.loop.control.Heard`.

    Args:
        token: fleet token.
        levels: over which time routers' reports are taken together.
        clock: monotonic seconds.
    """

    def __init__(
        self, token: str, *, levels: LevelSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._token = token
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._agents = Agents(token, listener=self._notify, clock=clock)
        self._levels = Levels(levels)
        self._routers: list[asyncio.Task[None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each report. It must not wait or raise."""
        self._listeners.append(listener)

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""
        return self._agents.told

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Follow exactly these agents: host:port by instance."""
        self._agents.follow(addresses)

    def follow_router(self, address: str) -> None:
        """Follow one more router: host:port of its gRPC server."""
        work = follow_router(address, self._token, self._take, clock=self._clock)
        self._routers.append(asyncio.create_task(work, name=f"router {address}"))

    def forecast(self, now: float) -> Forecast:
        """What will arrive."""
        return self._levels.forecast(now)

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the present capacity took."""
        return self._levels.stages(now, percentile=percentile, changed_age_seconds=changed_age_seconds)

    async def close(self) -> None:
        """Follow nothing any more."""
        for task in self._routers:
            task.cancel()
        await asyncio.gather(self._agents.close(), *self._routers, return_exceptions=True)

    def _take(self, report: LevelReport) -> None:
        self._levels.add(report)
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
