"""Two prefill and two decode agents, and views of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from router_brain.brain_helpers import wait_until
from router_brain.fleet_helpers import follow
from router_brain.scripted_agent import TOKEN, ScriptedAgent

from kllm_core.objectives import Role
from kllm_router.proxy.fleet_view import AgentFleetView, FleetViewSettings


@pytest.fixture
async def agents() -> AsyncIterator[list[ScriptedAgent]]:
    made = [
        await ScriptedAgent("p0").start(),
        await ScriptedAgent("p1").start(),
        await ScriptedAgent("d0", Role.DECODE).start(),
        await ScriptedAgent("d1", Role.DECODE).start(),
    ]
    yield made
    await asyncio.gather(*(agent.stop() for agent in made))


@pytest.fixture
async def views() -> AsyncIterator[Callable[..., AgentFleetView]]:
    made: list[AgentFleetView] = []

    def make(token: str = TOKEN, **values: object) -> AgentFleetView:
        made.append(AgentFleetView(token=token, settings=FleetViewSettings(**values)))
        return made[-1]

    yield make
    await asyncio.gather(*(view.book.close() for view in made))


@pytest.fixture
async def view(agents: list[ScriptedAgent], views: Callable[..., AgentFleetView]) -> AgentFleetView:
    made = views(lost_seconds=0.3, gone_seconds=1.0)
    follow(made, agents)
    await wait_until(lambda: made.ready and all(agent.subscribed for agent in agents))
    await wait_until(lambda: all(record.taken_at is not None for record in made.book.ordered))
    return made
