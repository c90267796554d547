"""Requests that come while no instance serves, as at a service that has been scaled to zero."""

from __future__ import annotations

import asyncio

import pytest
from loop.virtual_time import run_virtually
from router.router_helpers import FakeFleet, connected, router, until
from router.speaking import PATHS, at_rest, calls, engines, request, said, speaks

from kllm_core.objectives import Role
from kllm_router.interfaces import ApiError, Endpoint
from kllm_router.metrics import RouterMetrics
from kllm_router.proxy.recovery import Recovery
from kllm_router.proxy.waiting_room import WaitingRoom
from kllm_router.settings import RecoverySettings, WaitSettings

PREFILL = Endpoint("p0", Role.PREFILL, "127.0.0.1", 1)


def asleep() -> FakeFleet:
    return FakeFleet([], [])


def wake(fleet: FakeFleet) -> None:
    fleet.prefills.append(PREFILL)
    fleet.changes.set()


def recovery(fleet: FakeFleet, room: WaitingRoom) -> Recovery:
    return Recovery(fleet, settings=RecoverySettings(), spend=lambda: True, metrics=RouterMetrics(), room=room)


async def choice(fleet: FakeFleet, room: WaitingRoom, **body: str) -> Endpoint | ApiError:
    try:
        return await recovery(fleet, room).choose_prefill(request(PATHS[0], **body))
    except ApiError as error:
        return error


def test_a_request_waits_for_minutes_until_an_instance_serves():
    fleet, room = asleep(), WaitingRoom(WaitSettings(seconds=600))

    async def work() -> tuple[Endpoint | ApiError, float]:
        loop = asyncio.get_running_loop()
        loop.call_later(500, wake, fleet)
        return await choice(fleet, room), loop.time()

    assert run_virtually(work()) == (PREFILL, 500)
    assert (room.requests, room.bytes) == (0, 0)


def test_when_the_time_is_over_the_client_is_told_why_and_when_to_come_back():
    fleet, room = asleep(), WaitingRoom(WaitSettings(seconds=600))

    async def work() -> tuple[Endpoint | ApiError, float]:
        return await choice(fleet, room), asyncio.get_running_loop().time()

    error, at = run_virtually(work())
    assert (error.status, error.code, at) == (503, "no_instance", 600)
    assert "none has started within 600 seconds" in error.message
    assert error.retry_after >= 1
    assert (room.requests, room.bytes) == (0, 0)


def test_changes_that_bring_no_instance_do_not_make_the_wait_longer():
    fleet, room = asleep(), WaitingRoom(WaitSettings(seconds=10))

    async def work() -> float:
        loop = asyncio.get_running_loop()
        for second in range(1, 30):
            loop.call_later(second, fleet.changes.set)
        await choice(fleet, room)
        return loop.time()

    assert run_virtually(work()) == 10


def test_without_a_waiting_room_a_request_is_refused_at_once():
    async def work() -> tuple[Endpoint | ApiError, float]:
        return await choice(asleep(), WaitingRoom(WaitSettings())), asyncio.get_running_loop().time()

    error, at = run_virtually(work())
    assert (error.status, at) == (503, 0)


@pytest.mark.parametrize(
    ("bounds", "why"),
    [(WaitSettings(60, requests=2), "2 requests wait"), (WaitSettings(60, bytes=250), "bytes would wait; 250 may")],
)
def test_who_finds_the_room_full_is_refused_at_once_and_the_others_go_on_waiting(bounds, why):
    fleet, room = asleep(), WaitingRoom(bounds)

    async def work() -> None:
        first = [asyncio.ensure_future(choice(fleet, room, text="x" * 100)) for _ in range(2)]
        await asyncio.sleep(0)
        error = await choice(fleet, room, text="x" * 100)
        assert (error.status, error.retry_after) == (503, 5.0)
        assert why in error.message
        assert asyncio.get_running_loop().time() == 0
        wake(fleet)
        assert await asyncio.gather(*first) == [PREFILL, PREFILL]

    run_virtually(work())


def test_an_overloaded_fleet_is_not_waited_for():
    fleet, room = asleep(), WaitingRoom(WaitSettings(seconds=600))
    fleet.prefill_error = ApiError(429, "full", code="rate_limit_exceeded")

    async def work() -> tuple[Endpoint | ApiError, float]:
        return await choice(fleet, room), asyncio.get_running_loop().time()

    error, at = run_virtually(work())
    assert (error.status, at) == (429, 0)


def test_the_first_who_waits_is_told_of_and_the_next_are_not():
    fleet, room, told = asleep(), WaitingRoom(WaitSettings(seconds=60)), []
    room.listeners.append(lambda: told.append(room.requests))

    async def work() -> None:
        await asyncio.gather(choice(fleet, room), choice(fleet, room))
        await choice(fleet, room)

    run_virtually(work())
    assert told == [1, 1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_answered_once_the_fleet_serves(path):
    async with router(wait=WaitSettings(seconds=60)) as r:
        engines(r, speaks(1))
        prefills = list(r.fleet.prefills)
        r.fleet.prefills.clear()
        waiting = asyncio.ensure_future(said(r, request(path)))
        await until(lambda: r.pairing.room.requests)
        r.fleet.prefills.extend(prefills)
        r.fleet.changes.set()
        assert b"[DONE]" in await waiting
        assert len(calls(r.prefill)) == 1
        await at_rest(r)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_gives_its_place_back():
    async with router(wait=WaitSettings(seconds=60)) as r:
        r.fleet.prefills.clear()
        async with connected(r) as c:
            c.post()
            await until(lambda: r.pairing.room.requests)
        await until(lambda: not r.pairing.room.requests)
        assert r.pairing.room.bytes == 0
        await until(lambda: r.summaries)
        assert r.summaries[0].status == 499


@pytest.mark.asyncio(loop_scope="module")
async def test_the_client_s_own_limit_ends_the_wait():
    async with router(wait=WaitSettings(seconds=60)) as r, connected(r) as c:
        r.fleet.prefills.clear()
        c.post(headers={"x-kllm-timeout-seconds": "0.1"})
        assert (await c.answer()).status == 504
        assert r.pairing.room.requests == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_over_http_says_when_to_come_back():
    async with router(wait=WaitSettings(seconds=0.05)) as r, connected(r) as c:
        r.fleet.prefills.clear()
        c.post()
        answer = await c.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert "none has started within 0.05 seconds" in answer.json["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("seconds", "status"), [(0.0, 503), (60.0, 200)])
async def test_a_router_without_instances_is_ready_where_requests_may_wait(seconds, status):
    async with router(wait=WaitSettings(seconds=seconds)) as r, connected(r) as c:
        r.fleet.ready = False
        c.request("GET", "/readyz")
        assert (await c.answer()).status == status
