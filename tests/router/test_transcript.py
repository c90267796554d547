"""Token ids are taken out of a stream however it is cut, and nothing else is."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kllm_router.exceptions import ConnectionBrokenError
from kllm_router.proxy.relay import Relay
from kllm_router.proxy.transcript import Transcript
from kllm_router.settings import PoolLimits

IDS = st.lists(st.integers(0, 200_000), min_size=0, max_size=4)
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["\n: kllm-ids 7\n\n", "data: [DONE]\n\n", '"usage":{', 'data: {"error"']
)


def written(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def relay_of(transcript: Transcript, got: list[bytes]) -> Relay:
    relay = Relay(PoolLimits(), stream=True, keep_usage=True, transcript=transcript)
    relay.on_head(200, "text/event-stream")
    relay.attach(got.append)
    return relay


def run(parts: list[tuple[list[int], str]], cuts: list[int], *, until: int | None) -> tuple[bytes, Transcript]:
    """What a client gets of a stream that is read in pieces, up to some byte."""

    async def inner() -> tuple[bytes, Transcript]:
        transcript, got = Transcript(1 << 20), []
        relay = relay_of(transcript, got)
        whole = (
            b"".join(comment(ids) + written(text) for ids, text in parts) + written("", "stop") + b"data: [DONE]\n\n"
        )
        whole = whole[:until]
        edges = sorted({cut % (len(whole) + 1) for cut in cuts} | {0, len(whole)})
        for start, end in pairwise(edges):
            relay.on_data(whole[start:end])
        relay.on_lost(ConnectionBrokenError("x"))
        return b"".join(got), transcript

    return asyncio.run(inner())


def comment(ids: list[int]) -> bytes:
    return b": kllm-ids " + ",".join(map(str, ids)).encode() + b"\n\n"


@given(st.lists(st.tuples(IDS, TEXTS), max_size=6), st.lists(st.integers(0, 5000), max_size=8))
def test_ids_are_taken_out_and_everything_else_passes(parts, cuts):
    got, transcript = run(parts, cuts, until=None)
    assert got == b"".join(written(text) for _, text in parts) + written("", "stop") + b"data: [DONE]\n\n"
    assert transcript.ids == [number for ids, _ in parts for number in ids]
    assert transcript.finished


@given(st.lists(st.tuples(IDS, TEXTS), min_size=1, max_size=6), st.integers(0, 400))
def test_a_stream_that_is_read_in_part_gives_whole_events_only(parts, until):
    got, transcript = run(parts, [], until=until)
    assert got == b"" or got.endswith(b"\n\n")
    events = got.count(b"\n\n")
    if not transcript.finished:
        assert got == b"".join(written(text) for _, text in parts)[: len(got)]
        assert events <= len(parts)


def test_more_ids_than_are_kept_end_the_way_on():
    transcript = Transcript(8)
    transcript.take(comment([1, 2]) + written("a"))
    assert transcript.resumable
    transcript.take(comment([333, 444]) + written("b"))
    assert not transcript.resumable
