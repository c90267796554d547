"""Requests, and what a view of scripted agents shows, shared by the tests of views."""

from __future__ import annotations

import asyncio

from router_brain.scripted_agent import ScriptedAgent

from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import EngineRequest, WatchedEvent
from kllm_router.proxy.fleet_view import AgentFleetView

IDS = list(range(40))


def request(rid: str = "r" * 32, ids: list[int] | None = None, **values: object) -> EngineRequest:
    return EngineRequest(rid, "/v1/completions", {}, ids or IDS, **values)


def other(number: int) -> EngineRequest:
    """A request with a prompt like no other."""
    return request(f"{number:032x}", list(range(number * 1000, number * 1000 + 40)))


def follow(view: AgentFleetView, agents: list[ScriptedAgent]) -> None:
    view.book.apply([DiscoveredInstance(agent.id, agent.role, agent.address) for agent in agents])


def shown(view: AgentFleetView, instance_id: str) -> dict:
    return next(instance for instance in view.status()["instances"] if instance["id"] == instance_id)


async def heard(watch) -> WatchedEvent:
    async with asyncio.timeout(10):
        return await watch.next()
