"""Caches take the newer word, and sweeps set right what watches missed."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube.fake_api import FakeApi

from kllm_core.labels import MANAGED_BY, MANAGER, SERVICE
from kllm_operator.kube import informer
from kllm_operator.kube.cache import ObjectCache
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import UnreachableError
from kllm_operator.kube.informer import Informer
from kllm_operator.kube.resources import PODS
from kllm_operator.kube.sweep import sweep

OURS = f"{MANAGED_BY}={MANAGER}"


def pod(name, *, version=1, uid="u1", service="chat", **more):
    labels = {MANAGED_BY: MANAGER, **({SERVICE: service} if service else {})}
    metadata = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


def test_of_two_words_the_newer_counts_whatever_their_order():
    cache = ObjectCache(PODS)
    assert cache.put(pod("a", version=9, spec={"x": 1}))
    assert not cache.put(pod("a", version=10 - 1, spec={"x": 2}))
    assert not cache.put(pod("a", version=2, spec={"x": 3}))
    assert cache.get("default", "a")["spec"] == {"x": 1}
    assert cache.put(pod("a", version=10))


def test_a_late_answer_does_not_bring_a_deleted_object_back():
    cache = ObjectCache(PODS)
    cache.put(pod("a", version=5))
    assert cache.remove(pod("a", version=7))
    assert not cache.put(pod("a", version=6))
    assert cache.get("default", "a") is None
    assert cache.put(pod("a", version=8, uid="u2"))


def test_an_object_that_left_the_watch_with_its_label_comes_back_with_it():
    cache = ObjectCache(PODS)
    cache.put(pod("a", version=5))
    assert cache.remove(pod("a", version=7))
    assert not cache.remove(pod("a", version=7))
    assert cache.put(pod("a", version=8))
    assert [each["metadata"]["name"] for each in cache.of("default", "chat")] == ["a"]


def test_the_end_of_a_predecessor_does_not_remove_the_object_that_has_its_name():
    cache = ObjectCache(PODS)
    cache.put(pod("a", version=8, uid="u2"))
    assert not cache.remove(pod("a", version=7, uid="u1"))
    assert cache.get("default", "a")["metadata"]["uid"] == "u2"


def test_objects_are_found_by_their_service_and_leave_it_with_their_label():
    cache = ObjectCache(PODS)
    for name, service in (("b", "chat"), ("a", "chat"), ("c", "other"), ("d", None)):
        cache.put(pod(name, uid=name, service=service))
    assert [each["metadata"]["name"] for each in cache.of("default", "chat")] == ["a", "b"]
    assert cache.of("elsewhere", "chat") == []
    cache.put(pod("a", uid="a", version=2, service="other"))
    assert [each["metadata"]["name"] for each in cache.of("default", "chat")] == ["b"]
    assert [each["metadata"]["name"] for each in cache.of("default", "other")] == ["a", "c"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.randoms())
def test_any_order_of_words_leaves_the_last_state_of_each_object(changes, shuffler: random.Random):
    words, version = [], 0
    for number in changes:
        version += 1
        words.append(("put", pod(f"p{number}", uid=f"u{number}", version=version)))
    gone = {number for number in changes if number % 2}
    for number in gone:
        version += 1
        words.append(("remove", pod(f"p{number}", uid=f"u{number}", version=version)))
    shuffler.shuffle(words)
    cache = ObjectCache(PODS)
    for what, document in words:
        (cache.put if what == "put" else cache.remove)(document)
    newest = {f"p{number}": index + 1 for index, number in enumerate(changes) if number not in gone}
    assert {each["metadata"]["name"]: int(each["metadata"]["resourceVersion"]) for each in cache.all()} == newest
    assert len(cache.of("default", "chat")) == len(newest)


async def test_a_sweep_finds_what_has_gone_changed_and_come_and_reads_nothing_else():
    api, cache = FakeApi(), ObjectCache(PODS)
    kept, gone, changed = (api.seed(pod(name)) for name in ("kept", "gone", "changed"))
    for each in (kept, gone, changed):
        cache.put(each)
    api.remove(gone)
    api.change(changed, lambda document: document.update(spec={"x": 1}))
    api.seed(pod("new"))
    api.calls.clear()
    wrong = await sweep(api, cache, labels=OURS, namespaces=[None])
    assert sorted(each["metadata"]["name"] for each in wrong) == ["changed", "gone", "new"]
    assert sorted(each["metadata"]["name"] for each in cache.all()) == ["changed", "kept", "new"]
    assert cache.get("default", "changed")["spec"] == {"x": 1}
    assert api.calls == [("list", "Pod/"), ("get", "Pod/changed"), ("get", "Pod/new")]
    assert await sweep(api, cache, labels=OURS, namespaces=[None]) == []


async def test_a_sweep_does_not_take_an_object_for_gone_that_came_while_it_listed():
    api, cache = FakeApi(), ObjectCache(PODS)
    listing = api.list

    async def slow(*args, **kwargs):
        listed = await listing(*args, **kwargs)
        cache.put(api.seed(pod("late")))
        return listed

    api.list = slow
    assert await sweep(api, cache, labels=OURS, namespaces=[None]) == []
    assert cache.get("default", "late") is not None


@pytest.mark.parametrize("version", ["", "abc"])
def test_versions_that_cannot_be_compared_count_as_news(version):
    cache = ObjectCache(PODS)
    cache.put(pod("a", version=5))
    assert cache.put(pod("a", version=version))


async def test_a_watch_that_begins_anew_has_caches_swept_at_once(monkeypatch):
    monkeypatch.setattr(informer, "_GATHER_SECONDS", 0.0)
    api, caches, changed = FakeApi(), Caches(), asyncio.Queue()
    watching = Informer(
        login=None, api=api, caches=caches, namespaces=(),
        changed=lambda resource, document: changed.put_nowait((resource, document["metadata"]["name"])),
        corrected=lambda resource, objects: None,
    )  # fmt: skip
    gone, kept = api.seed(pod("gone")), api.seed(pod("kept"))
    take = watching._handler(caches.of(PODS))
    for each in (gone, kept):
        await take(event={"type": "ADDED", "object": each})
    sweeping = asyncio.create_task(watching.sweep())
    api.remove(gone)
    await take(event={"type": None, "object": kept})
    async with asyncio.timeout(10):
        assert [await changed.get() for _ in range(3)] == [(PODS, "gone"), (PODS, "kept"), (PODS, "gone")]
    sweeping.cancel()
    assert [each["metadata"]["name"] for each in caches.of(PODS).all()] == ["kept"]


async def test_who_begins_to_lead_catches_up_with_what_no_watch_has_told_yet():
    api, told = FakeApi(), []
    following = Informer(
        login=None, api=api, caches=Caches(), namespaces=(),
        changed=lambda resource, document: told.append(document["metadata"]["name"]),
        corrected=lambda resource, objects: None,
    )  # fmt: skip
    api.seed(pod("a"))
    api.fail = lambda verb, resource, name: UnreachableError("no answer") if resource == PODS else None
    assert not await following.catch_up()
    assert told == []
    api.fail = lambda *_: None
    assert await following.catch_up()
    assert told == ["a"]
