"""What of the operator goes on no more, in virtual time: a server that is away is no reason to call it dead."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kube.fake_api import FakeApi
from kube.test_cache_and_sweep import pod
from loop.virtual_time import run_virtually

from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import UnreachableError
from kllm_operator.kube.informer import Informer
from kllm_operator.kube.queue import WorkQueue
from kllm_operator.kube.resources import PODS

HOUR = 3600.0


class Watched:
    """An informer whose caches are swept, on a server whose pods change each minute.

    Attributes:
        tells: whether its watch tells of the changes.
    """

    def __init__(self, namespaces=()):
        self.api, caches = FakeApi(), Caches()
        self.informer = Informer(
            login=None, api=self.api, caches=caches, namespaces=namespaces, changed=lambda *_: None,
            corrected=lambda *_: None,
        )  # fmt: skip
        self._take = self.informer._handler(caches.of(PODS))
        self.tells = self.changes = True

    async def run(self):
        seeded = self.api.seed(pod("a"))
        while True:
            await asyncio.sleep(60)
            if self.changes:
                seeded = self.api.change(seeded, lambda document: document.update(status={"at": self.now}))
                if self.tells:
                    await self._take(event={"type": "MODIFIED", "object": seeded})

    @property
    def now(self):
        return asyncio.get_running_loop().time()


def after(seconds, **scene):
    """The informer's trouble, and how it was after it could hear again."""

    async def whole():
        watched = Watched()
        tasks = [asyncio.create_task(watched.run()), asyncio.create_task(watched.informer.sweep())]
        await asyncio.sleep(HOUR)
        assert watched.informer.trouble == ""
        for name, value in scene.items():
            setattr(watched if hasattr(watched, name) else watched.api, name, value)
        await asyncio.sleep(seconds)
        found = watched.informer.trouble
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    return run_virtually(whole())


def test_a_watch_that_is_lost_while_things_change_is_trouble_after_three_sweeps():
    assert after(600, tells=False) == ""
    assert "no watch told of anything while" in after(1500, tells=False)


def test_a_cluster_in_which_nothing_changes_is_no_trouble():
    assert after(24 * HOUR, tells=False, changes=False) == ""


def test_a_server_that_is_away_is_no_trouble():
    assert after(24 * HOUR, tells=False, fail=lambda verb, resource, name: UnreachableError("no answer")) == ""


def test_a_sweep_that_does_not_end_is_trouble():
    async def hang(*_, **__):
        await asyncio.Event().wait()

    assert after(500, list=hang) == ""
    assert "not compared with the API server" in after(1800, list=hang)


def test_before_the_first_fill_there_is_no_trouble():
    async def whole():
        watched = Watched()
        await asyncio.sleep(HOUR)
        return watched.informer.trouble

    assert run_virtually(whole()) == ""


@pytest.mark.parametrize(("workers", "stalled"), [(1, 90.0), (2, 0.0)])
def test_a_queue_of_which_nothing_is_taken_is_stalled_since_the_oldest_key_waits(workers, stalled):
    async def work(key):
        await asyncio.sleep(HOUR if key == "endless" else 0)

    async def whole():
        queue = WorkQueue(work, workers=workers)
        queue.add("early")
        await asyncio.sleep(50)
        # Who does not lead works on nothing, and is not stalled.
        assert queue.stalled_seconds == 0
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(1)
        queue.add("endless")
        await asyncio.sleep(9)
        queue.add("a")
        await asyncio.sleep(40)
        queue.add("b")
        await asyncio.sleep(50)
        found = queue.stalled_seconds
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert queue.stalled_seconds == 0
        return found

    assert run_virtually(whole()) == stalled
