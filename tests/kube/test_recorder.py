"""Events: what they say, and that nobody drowns in them."""

from __future__ import annotations

import asyncio

from kube.fake_api import FakeApi
from loop.virtual_time import run_virtually

from kllm_operator.kube.exceptions import ForbiddenError
from kllm_operator.kube.recorder import Recorder
from kllm_operator.kube.resources import EVENTS

SERVICE = {
    "apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService",
    "metadata": {"namespace": "default", "name": "chat", "uid": "u1", "resourceVersion": "5"},
}  # fmt: skip


def within(work):
    async def whole():
        api = FakeApi()
        recorder = Recorder(api, instance="operator-0")
        await work(api, recorder)
        await asyncio.sleep(1)
        await recorder.close()
        return [document for (resource, _, _), document in api.objects.items() if resource is EVENTS]

    return run_virtually(whole())


def test_an_event_says_what_was_done_to_what_and_by_whom():
    async def work(api, recorder):
        recorder.tell(SERVICE, reason="ScaledUp", note="decode 1 -> 2", action="Scale")

    (event,) = within(work)
    assert event["regarding"] == {**SERVICE["metadata"], "apiVersion": SERVICE["apiVersion"], "kind": SERVICE["kind"]}
    assert (event["reason"], event["note"], event["action"], event["type"]) == (
        "ScaledUp", "decode 1 -> 2", "Scale", "Normal",
    )  # fmt: skip
    assert event["reportingController"] == "kllm.io/operator"
    assert event["metadata"]["namespace"] == "default"


def test_the_same_words_are_told_once_in_two_minutes_and_other_words_at_once():
    async def work(api, recorder):
        for _ in range(119):
            recorder.tell(SERVICE, reason="R", note="same", action="A")
            await asyncio.sleep(1)
        recorder.tell(SERVICE, reason="R", note="other", action="A")
        await asyncio.sleep(10)
        recorder.tell(SERVICE, reason="R", note="same", action="A")

    assert sorted(event["note"] for event in within(work)) == ["other", "same", "same"]


def test_a_flood_is_cut():
    async def work(api, recorder):
        for number in range(5000):
            recorder.tell(SERVICE, reason="R", note=str(number), action="A")

    assert len(within(work)) <= 256


def test_a_long_note_is_cut_to_what_the_server_takes():
    async def work(api, recorder):
        recorder.tell(SERVICE, reason="R", note="x" * 5000, action="A", warning=True)

    (event,) = within(work)
    assert len(event["note"]) <= 1024
    assert event["type"] == "Warning"


def test_an_event_that_cannot_be_written_hurts_nobody():
    async def work(api, recorder):
        api.fail = lambda verb, resource, name: ForbiddenError("no events here")
        recorder.tell(SERVICE, reason="R", note="lost", action="A")

    assert within(work) == []
