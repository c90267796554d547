"""What hangs is found out with few lists: one for all of a service's pods, and that seldom."""

from __future__ import annotations

import asyncio

from kube.fake_api import FakeApi
from loop.virtual_time import run_virtually

from kllm_operator.kube.exceptions import UnreachableError
from kllm_operator.substrate.kubernetes_events import PodEvents

NOTE = "hostPath type check failed: /srv/llama is not a directory"


class World:
    """Events of one service's pods on an API server that needs a moment for each list.

    Attributes:
        lists: when each was asked for, in seconds since the begin, and what of.
        finished: of those that nobody gave up.
        told: how often something was news.
    """

    def __init__(self, *, list_seconds: float = 0.1) -> None:
        self.api = FakeApi()
        self.lists: list[tuple[float, str]] = []
        self.finished = self.told = 0
        self._list, self._list_seconds = self.api.list, list_seconds
        self.api.list = self._slow
        self.events = PodEvents(self.api, namespace="default", listener=self._hear)

    @property
    def times(self) -> list[float]:
        return [round(at, 1) for at, _ in self.lists]

    def warn(self, uid, note=NOTE, *, number=1, kind="Pod", namespace="default", severity="Warning"):
        self.api.seed({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "type": severity, "reason": "FailedMount", "note": note,
            "metadata": {"name": f"{uid}.{number}", "namespace": namespace},
            "regarding": {"kind": kind, "name": uid, "uid": uid},
        })  # fmt: skip

    def said(self, *uids):
        return {uid: problem.message for uid in uids if (problem := self.events.of(uid)) is not None}

    async def _slow(self, *arguments, **more):
        self.lists.append((asyncio.get_running_loop().time(), more["fields"]))
        await asyncio.sleep(self._list_seconds)
        found = await self._list(*arguments, **more)
        self.finished += 1
        return found

    def _hear(self):
        self.told += 1


def play(scene, **world):
    async def run():
        made = World(**world)
        try:
            await scene(made)
        finally:
            await made.events.close()

    run_virtually(run())


def test_all_pods_of_a_service_are_answered_by_one_list():
    pods = [f"p{number}" for number in range(10)]

    async def scene(world):
        for uid in pods[:9]:
            world.warn(uid, f"{NOTE} ({uid})")
        world.events.follow(pods)
        await asyncio.sleep(4)
        assert len(world.lists) == 1
        assert world.said(*pods) == {uid: f"FailedMount: {NOTE} ({uid})" for uid in pods[:9]}

    play(scene)


def test_pods_that_run_soon_are_not_asked_for():
    async def scene(world):
        world.events.follow({"a", "b"})
        await asyncio.sleep(2.5)
        world.events.follow({"b"})
        await asyncio.sleep(0.4)
        world.events.follow(())
        await asyncio.sleep(60)
        assert world.lists == []

    play(scene)


def test_what_is_wrong_is_told_within_ten_seconds_whenever_a_pod_begins_to_hang():
    """Even if another list has just begun, and the kubelet needs three seconds for its warning."""

    async def hanging_from(world, seconds):
        world.events.follow({"old"})
        await asyncio.sleep(seconds)
        world.events.follow({"old", "new"})
        await asyncio.sleep(3)
        world.warn("new")
        await asyncio.sleep(10 - 3)
        assert world.said("new")

    for tenths in range(0, 400, 7):
        play(lambda world, at=tenths / 10: hanging_from(world, at))


def test_a_pod_that_hangs_for_long_is_asked_for_less_and_less_often():
    async def scene(world):
        world.events.follow({"a", "b"})
        await asyncio.sleep(3600)
        pauses = [round(later - earlier, 1) for earlier, later in zip(world.times, world.times[1:], strict=False)]
        assert world.times[:3] == [3.0, 7.1, 14.4]
        assert pauses == sorted(pauses)
        assert pauses[-1] == 300.1

    play(scene)


def test_however_many_pods_come_one_after_the_other_lists_keep_their_distance():
    async def scene(world):
        pods: set[str] = set()
        for number in range(600):
            pods.add(f"p{number}")
            world.events.follow(frozenset(pods))
            await asyncio.sleep(0.1)
        assert len(world.lists) <= 60 / 4 + 1
        assert all(later - earlier >= 4 for earlier, later in zip(world.times, world.times[1:], strict=False))

    play(scene)


def test_a_list_that_is_under_way_is_never_given_up():
    """The API server counts it as its own failure."""

    async def scene(world):
        world.warn("a")
        world.events.follow({"a"})
        await asyncio.sleep(4)
        world.events.follow(())
        await asyncio.sleep(60)
        assert (len(world.lists), world.finished, world.told) == (1, 1, 0)
        assert not world.said("a"), "what nobody follows any more is not kept"

    play(scene, list_seconds=5.0)


def test_two_lists_are_never_under_way_at_once():
    async def scene(world):
        world.events.follow({"a"})
        await asyncio.sleep(5)
        world.events.follow({"b"})
        await asyncio.sleep(50)
        assert world.finished >= len(world.lists) - 1
        assert all(later - earlier >= 24 for earlier, later in zip(world.times, world.times[1:], strict=False))

    play(scene, list_seconds=20.0)


def test_of_a_single_pod_only_its_own_warnings_are_sent():
    async def scene(world):
        world.events.follow({"a"})
        await asyncio.sleep(4)
        assert world.lists[0][1] == "regarding.uid=a,type=Warning"

    play(scene)


def test_only_warnings_about_the_pods_themselves_count_and_the_last_of_them():
    async def scene(world):
        world.warn("a", "at first", number=1)
        world.warn("a", "at last", number=2)
        world.warn("a", "all is well", number=3, severity="Normal")
        world.warn("b", "of a node of that uid", kind="Node")
        world.warn("c", "elsewhere", namespace="other")
        world.warn("stranger")
        world.events.follow({"a", "b", "c"})
        await asyncio.sleep(4)
        assert world.said("a", "b", "c", "stranger") == {"a": "FailedMount: at last"}

    play(scene)


def test_what_is_said_again_is_no_news():
    async def scene(world):
        world.warn("a")
        world.events.follow({"a", "b"})
        await asyncio.sleep(30)
        assert len(world.lists) >= 3
        assert world.told == 1
        world.warn("a", "something else", number=2)
        await asyncio.sleep(60)
        assert (world.told, world.said("a")) == (2, {"a": "FailedMount: something else"})

    play(scene)


def test_an_api_server_that_does_not_answer_is_asked_again_later():
    async def scene(world):
        world.warn("a")
        world.api.fail = lambda verb, *_: UnreachableError("no answer")
        world.events.follow({"a"})
        await asyncio.sleep(4)
        world.api.fail = lambda verb, *_: None
        await asyncio.sleep(4)
        assert world.times == [3.0, 7.1]
        assert world.said("a")

    play(scene)


def test_closed_it_asks_for_nothing():
    async def scene(world):
        world.events.follow({"a"})
        await asyncio.sleep(3.05)
        await world.events.close()
        await asyncio.sleep(60)
        assert (len(world.lists), world.finished) == (1, 0)

    play(scene)
