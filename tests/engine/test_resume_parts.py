"""The parts that continue a stream: what is asked for, where text may be cut, and what leaves as one chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_engine.sglang.chunks import ChunkStream
from kllm_engine.sglang.continuation import CHAT, COMPLETIONS, GENERATE, ContinuationError, Wish, read_wish
from kllm_engine.sglang.pieces import Cleanness, Pieces, WholeTokens
from kllm_engine.sglang.steps import ParsedSteps, PlainSteps

VOCABULARY = 256


def decode(ids: Sequence[int]) -> str:
    """Each id is a byte."""
    return bytes(ids).decode(errors="replace")


def wish(path: str = GENERATE, **body):
    return read_wish(path, {"input_ids": [1, 2, 3], "prompt": [1, 2, 3], **body}, vocabulary=VOCABULARY, context=100)


def test_a_request_without_the_fields_has_no_wish():
    assert wish() is None
    assert wish("/v1/embeddings", kllm_token_ids=True) is None
    assert read_wish(CHAT, ["no object"], vocabulary=VOCABULARY, context=100) is None


def test_both_fields_are_read_on_all_three_paths():
    for path in (CHAT, COMPLETIONS, GENERATE):
        assert wish(path, kllm_token_ids=True) == Wish(True, [], False)
        assert wish(path, kllm_resume_output_ids=[5, 6]) == Wish(False, [5, 6], False)
    assert wish(kllm_resume_output_ids=[]) == wish(kllm_resume_output_ids=None) == Wish(False, [], False)


def test_tools_are_seen_wherever_they_are_defined_and_not_when_they_are_off():
    assert wish(CHAT, kllm_token_ids=True, tools=[{}]).tools
    assert wish(CHAT, kllm_token_ids=True, messages=[{"role": "system", "tools": [{}]}]).tools
    assert not wish(CHAT, kllm_token_ids=True, tools=[{}], tool_choice="none").tools


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (GENERATE, {"kllm_token_ids": 1}, "kllm_token_ids must be true or false"),
        (GENERATE, {"kllm_resume_output_ids": "12"}, "must be a list"),
        (GENERATE, {"kllm_resume_output_ids": {"a": 1}}, "must be a list"),
        (GENERATE, {"kllm_resume_output_ids": [1, 256]}, r"\[1\] must be a token id from 0 to 255, got 256"),
        (GENERATE, {"kllm_resume_output_ids": [-1]}, "got -1"),
        (GENERATE, {"kllm_resume_output_ids": [True]}, "got True"),
        (GENERATE, {"kllm_resume_output_ids": [1.0]}, "got 1.0"),
        (GENERATE, {"kllm_resume_output_ids": [[1]]}, r"got \[1\]"),
        (GENERATE, {"kllm_resume_output_ids": [1] * 97}, "97 ids after a prompt of 3, the context ends at 100"),
        (GENERATE, {"kllm_resume_output_ids": [1, 1], "sampling_params": {"max_new_tokens": 1}}, "at most 1 output"),
        (COMPLETIONS, {"kllm_resume_output_ids": [1, 1], "max_tokens": 1}, "at most 1 output"),
        (CHAT, {"kllm_resume_output_ids": [1, 1], "max_completion_tokens": 1}, "at most 1 output"),
        (CHAT, {"kllm_resume_output_ids": [1], "n": 2}, "set n to 1"),
        (GENERATE, {"kllm_resume_output_ids": [1], "sampling_params": {"n": 2}}, "set n to 1"),
        (GENERATE, {"kllm_resume_output_ids": [1], "return_logprob": True}, "leave return_logprob out"),
        (GENERATE, {"kllm_resume_output_ids": [1], "input_ids": [[1], [2]]}, "one list of token ids"),
        (COMPLETIONS, {"kllm_resume_output_ids": [1], "prompt": "text"}, "one list of token ids"),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_the_field_and_the_fix(path, body, reason):
    with pytest.raises(ContinuationError, match=reason):
        wish(path, **body)


@given(st.text(max_size=20), st.binary(max_size=6))
def test_pieces_add_up_to_the_text_and_end_only_between_characters(text, prompt):
    ids = list(text.encode())
    pieces = Pieces(decode, list(prompt + b"x"))
    cleanness = Cleanness(WholeTokens(decode, VOCABULARY), decode)

    told = ""
    for count, token in enumerate(ids, start=1):
        piece = pieces.add(token)
        whole = not decode(ids[:count]).endswith("\ufffd")
        assert (piece is not None) == whole == cleanness.after([token])
        told += piece or ""
        if whole:
            assert told == decode(ids[:count])


@given(st.binary(max_size=24), st.data())
def test_pieces_of_bytes_that_are_no_text_go_on_from_any_clean_point(output, data):
    prompt, ids = [7, 8, 9], list(output)
    pieces = Pieces(decode, prompt)
    told = [pieces.add(token) for token in ids]
    clean = [count for count in range(len(ids) + 1) if count == 0 or told[count - 1] is not None]
    cut = data.draw(st.sampled_from(clean))

    resumed = Pieces(decode, prompt)
    assert [resumed.add(token) for token in ids] == told
    later = Pieces(decode, prompt + ids[:cut])
    assert "".join(later.add(token) or "" for token in ids[cut:]) == "".join(piece or "" for piece in told[cut:])


def content(text: str, ids: list[int], *, finish: str | None = None, **meta):
    reason = None if finish is None else {"type": finish}
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


def cleanness() -> Cleanness:
    return Cleanness(WholeTokens(decode, VOCABULARY), decode)


def test_nothing_is_shown_in_the_middle_of_a_character_and_its_ids_come_with_the_rest():
    steps = PlainSteps(cleanness())
    a, e = list(b"a"), list("\u00e9".encode())
    one, two, three = content("a", a), content("a", a + e[:1]), content("a\u00e9", a + e)

    assert list(steps.of(one)) == [one]
    assert steps.taken() == a
    assert list(steps.of(two)) == []
    assert list(steps.of(three)) == [three]
    assert steps.taken() == e


def test_a_parser_s_ids_are_told_only_up_to_the_last_whole_character():
    steps = parsed()
    first, rest = list("a\u4e2d".encode()[:2]), list("a\u4e2d".encode())

    assert [step["text"] for step in steps.of(content("a", first))] == ["a"]
    assert steps.taken() == list(b"a")
    assert [step["text"] for step in steps.of(content("a\u4e2d", rest))] == ["a\u4e2d"]
    assert steps.taken() == rest[1:]


def test_an_end_is_shown_even_in_the_middle_of_a_character():
    steps = PlainSteps(cleanness())
    last = content("\ufffd", [0xE4], finish="length")
    assert list(steps.of(last)) == [last]


def test_resumed_ids_are_not_told_again():
    steps = PlainSteps(cleanness(), seen=2)
    assert list(steps.of(content("abc", list(b"abc"))))
    assert steps.taken() == list(b"c")


def parsed(**arguments) -> ParsedSteps:
    return ParsedSteps(Pieces(decode, [1]), **arguments)


def test_a_parser_hears_each_token_alone_however_many_came_at_once():
    together = list(parsed().of(content("abc", list(b"abc"), completion_tokens=3, output_token_logprobs_length=2)))

    assert [step["text"] for step in together] == ["a", "ab", "abc"]
    assert [step["output_ids"] for step in together] == [list(b"a"), list(b"ab"), list(b"abc")]
    assert [step["meta_info"]["completion_tokens"] for step in together] == [1, 2, 3]
    assert [step["meta_info"]["output_token_logprobs_length"] for step in together] == [0, 1, 2]


@given(st.lists(st.sampled_from("ab\u00e9\u4e2d\U0001f600"), min_size=1, max_size=8).map("".join), st.data())
def test_a_parser_hears_the_same_whatever_comes_together(text, data):
    ids = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})

    def heard(counts):
        steps = parsed()
        last = counts[-1]
        return [
            step["text"]
            for count in counts
            for step in steps.of(
                content(decode(ids[:count]).rstrip("\ufffd"), ids[:count], finish="stop" if count == last else None)
            )
        ]

    assert heard(cuts) == heard(list(range(1, len(ids) + 1)))


def test_text_that_a_stop_string_takes_back_is_never_heard():
    steps = list(parsed().of(content("ab", list(b"abEND"), finish="stop", completion_tokens=5)))

    assert [step["text"] for step in steps] == ["a", "ab", "ab"]
    assert [step["meta_info"]["finish_reason"] for step in steps] == [None, None, {"type": "stop"}]


class Client:
    """Collects what an ASGI server would be given."""

    def __init__(self) -> None:
        self.messages = []

    async def send(self, message) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


def body(data: bytes, more: bool = True):
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_events_leave_as_one_chunk_behind_their_ids():
    client, chunks = Client(), ChunkStream()
    chunks.holding = True
    send = chunks.begin(client.send)

    async def respond() -> None:
        await send({"type": "http.response.start"})
        await send(body(b"data: 1\n\n"))
        await send(body(b"data: 2\n\n"))
        assert client.bodies == []
        await chunks.release([5, 6])
        # An id without an event waits for the next event.
        await chunks.release([7])
        await send(body(b"data: 3\n\n"))
        await chunks.release([8])
        await send(body(b"data: 4\n\n"))
        await send(body(b"data: [DONE]\n\n"))
        await send(body(b"", more=False))

    asyncio.run(respond())

    assert client.bodies == [
        b": kllm-ids 5,6\n\ndata: 1\n\ndata: 2\n\n", b": kllm-ids 7,8\n\ndata: 3\n\n", b"data: 4\n\ndata: [DONE]\n\n",
    ]  # fmt: skip
    assert client.messages[0] == {"type": "http.response.start"}
    assert client.messages[-1]["more_body"] is False


def test_muted_events_are_dropped_and_others_pass_at_once():
    client, chunks = Client(), ChunkStream()
    send = chunks.begin(client.send)

    async def respond() -> None:
        chunks.muted = True
        await send(body(b"data: 1\n\n"))
        chunks.muted = False
        await send(body(b"data: 2\n\n"))
        assert client.bodies == [b"data: 2\n\n"]
        chunks.muted = True
        await send(body(b"", more=False))

    asyncio.run(respond())
    assert client.bodies == [b"data: 2\n\n", b""]
