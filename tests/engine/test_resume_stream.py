"""What SGLang's stream handler sees of a request that tells its ids or goes on after earlier ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kllm_engine.sglang import resume
from kllm_engine.sglang.chunks import ChunkStream
from kllm_engine.sglang.continuation import CHAT, COMPLETIONS, GENERATE, RESUMED_COUNT, ContinuationError, Wish

PROMPT = list(b"prompt ")


class Tokenizer:
    """Each id is a byte."""

    is_fast = True

    def __len__(self):
        return 256

    def decode(self, ids, *, skip_special_tokens, spaces_between_special_tokens):
        return bytes(ids).decode(errors="replace")


class Manager:
    """SGLang's TokenizerManager with an engine that says given bytes, some at a time."""

    def __init__(self, output: bytes, *, pace: int = 1, finish: str = "stop") -> None:
        self.tokenizer = Tokenizer()
        self.incremental_streaming_output = False
        self.server_args = SimpleNamespace(reasoning_parser=None)
        self.model_config = SimpleNamespace(vocab_size=256)
        self.preferred_sampling_params = None
        self.asked: list[Any] = []
        self._output, self._pace, self._finish = list(output), pace, finish

    def config_value(self, name: str) -> str:
        return f"some {name}"

    async def generate(self, _manager, obj, _request):
        self.asked.append(obj)
        for count in [*range(self._pace, len(self._output), self._pace), len(self._output)]:
            ended = count == len(self._output)
            reason = {"type": self._finish, "length": count} if ended else None
            ids = self._output[:count]
            yield {
                "text": bytes(ids).decode(errors="ignore"), "output_ids": ids,
                "meta_info": {
                    "id": obj.rid, "finish_reason": reason, "prompt_tokens": len(obj.input_ids),
                    "completion_tokens": count, "cached_tokens": len(obj.input_ids) - 1,
                },
            }  # fmt: skip


def asked(**sampling: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rid="r", input_ids=PROMPT, stream=True, return_logprob=False, return_hidden_states=False,
        return_routed_experts=False, return_sampling_mask=False, sampling_params={"max_new_tokens": 40} | sampling,
    )  # fmt: skip


class Heard:
    """The handler and the client in one."""

    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def send(self, message) -> None:
        self.bodies.append(message["body"])


def run(manager: Manager, obj: Any, wish: Wish | None, *, path: str = COMPLETIONS, stream: bool = True) -> Heard:
    """Drive the handler's loop; each content makes one event with its new text."""
    heard, chunks = Heard(), ChunkStream()
    scope = {"path": path, "kllm.wish": wish} | ({"kllm.chunks": chunks} if stream else {})

    async def loop() -> None:
        send = chunks.begin(heard.send)
        told = 0
        async for content in resume.generate_request(manager.generate, manager, obj, SimpleNamespace(scope=scope)):
            heard.contents.append(content)
            event = content["text"][told:].encode()
            told = len(content["text"])
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    asyncio.run(loop())
    return heard


def wish(resumed: str | bytes = b"", *, token_ids: bool = True, tools: bool = False) -> Wish:
    return Wish(token_ids, list(resumed.encode() if isinstance(resumed, str) else resumed), tools)


def test_requests_without_a_wish_are_not_wrapped():
    manager, obj = Manager(b"ab"), asked()
    request = SimpleNamespace(scope={"path": CHAT, "kllm.wish": None})

    plain = resume.generate_request(manager.generate, manager, obj, request)

    assert plain.ag_code is manager.generate(manager, obj, None).ag_code
    assert resume.generate_request(manager.generate, manager, obj).ag_code is plain.ag_code


def test_ids_are_told_before_their_text_and_the_end_without_ids():
    heard = run(Manager("a\u00e9b".encode()), asked(), wish())

    assert heard.bodies == [b": kllm-ids 97\n\na", b": kllm-ids 195,169\n\n\xc3\xa9", b"b"]


def test_several_choices_tell_no_ids_and_pass_at_once():
    heard = run(Manager(b"abc"), asked(n=2), wish())

    assert heard.bodies == [b"a", b"b", b"c", b""]


def test_a_resumed_request_asks_the_engine_for_the_rest():
    manager, obj = Manager(b"def"), asked(max_new_tokens=10, min_new_tokens=5, custom_params={"mine": 1})
    before = dict(obj.sampling_params)

    run(manager, obj, wish("abc"))

    (got,) = manager.asked
    assert got.input_ids == [*PROMPT, *b"abc"]
    assert got.sampling_params["max_new_tokens"] == 7
    assert got.sampling_params["min_new_tokens"] == 2
    assert got.sampling_params["custom_params"] == {"mine": 1, RESUMED_COUNT: 3}
    assert before["max_new_tokens"] == 10
    assert list(b"prompt ") == PROMPT


@pytest.mark.parametrize(("given", "expected"), [({"max_new_tokens": None}, None), ({}, 125)])
def test_without_a_limit_the_engine_s_own_holds(given, expected):
    manager, obj = Manager(b"def"), asked()
    obj.sampling_params = given

    run(manager, obj, wish("abc"))

    assert manager.asked[0].sampling_params["max_new_tokens"] == expected


def test_the_client_hears_only_what_is_new_and_usage_is_that_of_the_whole():
    heard = run(Manager(b"def", finish="length"), asked(), wish("abc"))

    assert heard.bodies == [b": kllm-ids 100\n\nd", b": kllm-ids 101\n\ne", b"f"]
    first, *_, last = heard.contents
    assert (first["text"], first["output_ids"], first["meta_info"]["completion_tokens"]) == ("abc", list(b"abc"), 3)
    assert first["meta_info"]["finish_reason"] is None
    assert last["text"] == "abcdef"
    assert last["output_ids"] == list(b"abcdef")
    meta = last["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert meta["cached_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 6}


def test_a_stream_of_whole_outputs_needs_no_replay():
    heard = run(Manager(b"def"), asked(), wish("abc"), path=GENERATE)

    assert [content["text"] for content in heard.contents] == ["abcd", "abcde", "abcdef"]


def test_an_answer_in_one_piece_is_corrected_too():
    heard = run(Manager(b"def", pace=3), asked(), wish("abc", token_ids=False), stream=False)

    assert [content["text"] for content in heard.contents] == ["abcdef"]
    assert heard.contents[0]["meta_info"]["completion_tokens"] == 6


def test_a_parser_hears_in_the_replay_what_it_heard_at_first():
    first = run(Manager("a\u00e9bcd".encode(), pace=4), asked(), wish(tools=True), path=CHAT)
    again = run(Manager(b"cd"), asked(), wish("a\u00e9b", tools=True), path=CHAT)

    texts = [content["text"] for content in first.contents]
    assert texts == ["a", "a\u00e9", "a\u00e9b", "a\u00e9bc", "a\u00e9bcd"]
    assert [content["text"] for content in again.contents] == texts
    assert again.bodies == [b": kllm-ids 99\n\nc", b"d"]


def test_when_nothing_is_left_the_engine_is_not_asked():
    manager = Manager(b"never")
    heard = run(manager, asked(max_new_tokens=3), wish("abc"))

    assert manager.asked == []
    assert heard.bodies == [b""]
    last = heard.contents[-1]
    assert last["text"] == "abc"
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert (last["meta_info"]["prompt_tokens"], last["meta_info"]["completion_tokens"]) == (len(PROMPT), 3)


@pytest.mark.parametrize("tools", [False, True])
def test_ids_that_end_within_a_character_are_refused(tools):
    with pytest.raises(ContinuationError, match="middle of a character"):
        run(Manager(b"x"), asked(), wish(b"a\xc3", tools=tools), path=CHAT)


def test_more_ids_than_output_tokens_are_refused():
    with pytest.raises(ContinuationError, match="3 ids, at most 2"):
        run(Manager(b"x"), asked(max_new_tokens=2), wish("abc"))


def test_an_engine_that_streams_increments_cannot_resume_and_tells_no_ids():
    manager = Manager(b"ab")
    manager.incremental_streaming_output = True

    assert run(manager, asked(), wish()).bodies == [b"a", b"b", b""]
    with pytest.raises(ContinuationError, match="incremental-streaming-output"):
        run(manager, asked(), wish("abc"))


def test_a_failure_of_the_engine_is_told_without_a_replay():
    class Failing(Manager):
        async def generate(self, _manager, obj, _request):
            reason = {"type": "abort", "status_code": 500, "message": "gone"}
            yield {"text": "", "output_ids": [], "meta_info": {"id": obj.rid, "finish_reason": reason}}

    heard = run(Failing(b""), asked(), wish("abc"))

    (only,) = heard.contents
    assert only["meta_info"]["finish_reason"]["message"] == "gone"
