"""All that is heard of one service: its agents and its routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

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
        hear: is given each report of a router; must not wait or raise.
    """

    def __init__(
        self,
        token: str,
        *,
        levels: LevelSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        hear: Callable[[LevelReport], None] = lambda _: None,
    ) -> None:
        self._token = token
        self._hear = hear
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._agents = Agents(token, listener=self._notify, clock=clock)
        self._levels = Levels(levels)
        self._silent_seconds = (levels or LevelSettings()).silent_seconds
        self._routers: dict[str, asyncio.Task[None]] = {}
        self._heard_at: dict[str, float] = {}
        self._unshared: dict[str, str] = {}

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each report that tells something new. It must not wait or raise."""
        self._listeners.append(listener)

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""
        return self._agents.told

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Follow exactly these agents: host:port by instance."""
        self._agents.follow(addresses)

    def follow_routers(self, addresses: Collection[str]) -> None:
        """Follow exactly these routers: host:port of their gRPC servers. One that is silent may hide traffic."""
        for address in self._routers.keys() - set(addresses):
            self._routers.pop(address).cancel()
            del self._heard_at[address]
            self._unshared.pop(address, None)
        for address in set(addresses) - self._routers.keys():
            self._heard_at[address] = self._clock()
            work = follow_router(address, self._token, partial(self._take, address), clock=self._clock)
            self._routers[address] = asyncio.create_task(work, name=f"router {address}")

    def forecast(self, now: float) -> Forecast:
        """What will arrive."""
        told = all(now - at <= self._silent_seconds for at in self._heard_at.values())
        return replace(self._levels.forecast(now), complete=told)

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the present capacity took."""
        return self._levels.stages(now, percentile=percentile, changed_age_seconds=changed_age_seconds)

    @property
    def unshared(self) -> str:
        """Why routers do not hear each other though they are to, as one of them says; empty when all do."""
        return next((why for _, why in sorted(self._unshared.items()) if why), "")

    async def close(self) -> None:
        """Follow nothing any more."""
        tasks = list(self._routers.values())
        self.follow_routers(())
        await asyncio.gather(self._agents.close(), *tasks, return_exceptions=True)

    def _take(self, address: str, report: LevelReport) -> None:
        self._heard_at[address] = report.at
        self._unshared[address] = report.unshared
        self._levels.add(report)
        self._hear(report)
        if report.arrivals or report.stages or report.waiting:
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
