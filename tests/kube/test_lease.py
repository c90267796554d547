"""Leader election in virtual time, on an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt

import pytest
from kube.fake_api import FakeApi
from loop.virtual_time import run_virtually

from kllm_operator.kube.exceptions import UnreachableError
from kllm_operator.kube.lease import Election, LeaseLostError, LeaseSettings
from kllm_operator.kube.resources import LEASES

_MIDNIGHT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def candidate(api, identity, *, off_seconds=0.0):
    """A candidate whose wall clock is off by some seconds."""
    loop = asyncio.get_running_loop()
    return Election(
        api, namespace="system", name="kllm-operator", identity=identity,
        wall=lambda: _MIDNIGHT + dt.timedelta(seconds=loop.time() + off_seconds),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(work):
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def holder(api):
    return api.one(LEASES, "kllm-operator", "system")["spec"]["holderIdentity"]


def test_the_first_candidate_leads_and_the_second_waits_as_long_as_the_first_renews():
    async def whole():
        api = FakeApi()
        first, second = candidate(api, "first"), candidate(api, "second", off_seconds=3600)
        await first.acquire()
        async with running(first.keep()), running(second.acquire()) as waiting:
            for _ in range(60):
                await asyncio.sleep(5)
                assert first.leading
                assert not second.leading
            assert not waiting.done()
        assert holder(api) == "first"

    run_virtually(whole())


def test_another_takes_over_a_lease_after_its_leader_died_and_not_before():
    async def whole():
        api = FakeApi()
        first, second = candidate(api, "first"), candidate(api, "second", off_seconds=-3600)
        await first.acquire()
        async with running(first.keep()), running(second.acquire()) as waiting:
            await asyncio.sleep(20)
        died = asyncio.get_running_loop().time()
        assert not waiting.done() or waiting.cancelled()
        async with asyncio.timeout(30):
            await second.acquire()
        took = asyncio.get_running_loop().time() - died
        assert 10 <= took <= 20
        assert holder(api) == "second"
        assert api.one(LEASES, "kllm-operator", "system")["spec"]["leaseTransitions"] == 1
        assert not first.leading

    run_virtually(whole())


def test_a_lease_that_was_given_up_is_taken_within_two_looks():
    async def whole():
        api = FakeApi()
        first, second = candidate(api, "first"), candidate(api, "second")
        await first.acquire()
        async with running(second.acquire()) as waiting:
            await asyncio.sleep(5)
            await first.release()
            assert not first.leading
            async with asyncio.timeout(4.5):
                await waiting
        assert second.leading

    run_virtually(whole())


def test_a_leader_that_cannot_renew_stops_before_another_may_begin():
    async def whole():
        api = FakeApi()
        first, second = candidate(api, "first"), candidate(api, "second")
        await first.acquire()
        lost = asyncio.get_running_loop().time()
        partition = {"first": True}

        class Cut:
            """The way of the first candidate to the server, which is cut."""

            def __getattr__(self, name):
                async def refuse(*args, **kwargs):
                    raise UnreachableError("no route")

                return refuse if partition["first"] else getattr(api, name)

        first._api = Cut()
        with pytest.raises(LeaseLostError, match="not renewed in 10 s"):
            await first.keep()
        assert not first.leading
        assert asyncio.get_running_loop().time() - lost <= 12
        assert holder(api) == "first"
        await second.acquire()
        assert asyncio.get_running_loop().time() - lost >= 15

    run_virtually(whole())


def test_calls_that_hang_do_not_keep_a_leader_beyond_its_time():
    async def whole():
        api = FakeApi()
        first = candidate(api, "first")
        await first.acquire()

        class Hung:
            def __getattr__(self, name):
                async def hang(*args, **kwargs):
                    await asyncio.sleep(1000)

                return hang

        first._api = Hung()
        began = asyncio.get_running_loop().time()
        with pytest.raises(LeaseLostError):
            await first.keep()
        assert asyncio.get_running_loop().time() - began <= 12

    run_virtually(whole())


def test_a_leader_whose_lease_someone_took_stops_at_the_next_look():
    async def whole():
        api = FakeApi()
        first = candidate(api, "first")
        await first.acquire()
        lease = api.one(LEASES, "kllm-operator", "system")
        api.change(lease, lambda document: document["spec"].update(holderIdentity="usurper"))
        with pytest.raises(LeaseLostError, match="usurper"):
            await first.keep()
        assert not first.leading
        assert asyncio.get_running_loop().time() <= 3

    run_virtually(whole())


def test_of_two_that_see_a_lease_expired_one_leads():
    async def whole():
        api = FakeApi()
        dead = candidate(api, "dead")
        await dead.acquire()
        led = []

        async def run(one):
            await one.acquire()
            led.append(one)
            await one.keep()

        tasks = [asyncio.create_task(run(candidate(api, f"other-{number}"))) for number in range(5)]
        await asyncio.sleep(300)
        assert len(led) == 1
        assert led[0].leading
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(whole())


def test_times_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="retry_seconds < renew_seconds"):
        LeaseSettings(renew_seconds=20)
