"""A stream that breaks goes on at another pair of engines as if it had never broken."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import re
from typing import Any

import pytest
from engine_stream import Pair, Told, Unit
from service_under_test import Service
from test_milestones import engine_at

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("idle_afterwards")]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TEXT = {CHAT: "content", COMPLETIONS: "text"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Praha"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 4, "maxItems": 4},
    },
    "required": ["city", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
async def pairs(service: Service) -> list[Pair]:
    """Two pairs that share no engine."""
    fleet = json.loads((service.run / "fleet.json").read_text())
    facts: dict[str, list[Any]] = {"prefill": [], "decode": []}
    for item in fleet["instances"]:
        async with engine_at(item["agent"], service.token) as engine:
            facts[item["role"]].append(engine.facts)
    return [Pair(*engines, service.token) for engines in zip(facts["prefill"], facts["decode"], strict=True)]


def prompt(seed: int, length: int = 40) -> list[int]:
    return [random.Random(seed * 77_003 + n).randrange(10, 500) for n in range(length)]


def chat(seed: int, *, tokens: int = 40, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "not read, because the ids are given"}]
    body = {"model": "test-model", "messages": messages, "input_ids": prompt(seed), "temperature": 0}
    return body | {"max_tokens": tokens} | fields


def completion(seed: int, *, tokens: int = 40, **fields: Any) -> dict[str, Any]:
    return {"model": "test-model", "prompt": prompt(seed), "temperature": 0, "max_tokens": tokens} | fields


def generation(seed: int, *, tokens: int = 40, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt(seed), "sampling_params": {"temperature": 0, "max_new_tokens": tokens} | sampling}


TIMELESS_META = ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens")


def timeless(event: Any) -> Any:
    """An event without what differs from run to run."""
    if not isinstance(event, dict):
        return event
    kept = {name: copy.deepcopy(value) for name, value in event.items() if name not in {"id", "created"}}
    if "meta_info" in kept:
        kept["meta_info"] = {name: event["meta_info"][name] for name in TIMELESS_META}
    for choice in kept.get("choices", ()):
        for call in choice.get("delta", {}).get("tool_calls") or ():
            call["id"] = call["id"] is not None
    return kept


def shown(path: str, units: list[Unit]) -> list[Any]:
    """What a client sees: events, with texts that follow one another as one, because their cuts depend on the time."""
    events = [timeless(event) for unit in units for event in unit.events]
    if path == GENERATE:
        # Each event has all text so far: the end is enough where the text has only grown.
        texts = [event["text"] for event in events if isinstance(event, dict)]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts[:-1]))
        return events[-2:]
    merged: list[Any] = []
    for event in itertools.chain.from_iterable(text_apart(path, event) for event in events):
        if merged and is_text(path, merged[-1]) and is_text(path, event):
            place(path, merged[-1])[TEXT[path]] += place(path, event)[TEXT[path]]
        elif not is_text(path, event) or place(path, event)[TEXT[path]]:
            merged.append(event)
    return merged


def text_apart(path: str, event: Any) -> list[Any]:
    """A completion may end in an event that has text: that as two events."""
    if path != COMPLETIONS or not isinstance(event, dict) or not event["choices"]:
        return [event]
    choice = event["choices"][0]
    if choice["finish_reason"] is None:
        return [event]
    return [
        event | {"choices": [choice | {"finish_reason": None, "matched_stop": None}]},
        event | {"choices": [choice | {"text": ""}]},
    ]


def place(path: str, event: Any) -> dict[str, Any]:
    choice = event["choices"][0]
    return choice["delta"] if path == CHAT else choice


def is_text(path: str, event: Any) -> bool:
    """Whether an event has text and nothing else."""
    if not isinstance(event, dict) or not event["choices"] or event["choices"][0]["finish_reason"]:
        return False
    told = place(path, event)
    return told.get(TEXT[path]) is not None and not told.get("role") and not event["choices"][0].get("logprobs")


def cut_points(told: Told) -> list[int]:
    """Numbers of units after which the stream could break: the first, some of the middle, the last."""
    announced = [number for number, unit in enumerate(told.units, start=1) if unit.ids is not None]
    assert announced, told.body
    middle = announced[1:-1]
    return sorted({announced[0], *middle[:: max(1, len(middle) // 4)], announced[-1]})


async def check(pairs: list[Pair], path: str, body: dict[str, Any]) -> Told:
    """Break a stream at several points, go on elsewhere, and compare with one that was left alone."""
    first, second = pairs
    alone = await first.stream(path, body)
    told = await first.stream(path, body, kllm_token_ids=True)

    assert alone.status == told.status == 200, (alone.body, told.body)
    assert told_text(path, told.events) == told_text(path, alone.events)
    assert timeless(told.events[-1]) == timeless(alone.events[-1])
    whole = shown(path, told.units)
    for cut in cut_points(told):
        ids = told.ids(cut)
        rest = await second.stream(path, body, kllm_token_ids=True, kllm_resume_output_ids=ids)
        assert rest.status == 200, rest.body
        assert shown(path, told.units[:cut] + rest.units) == whole, f"after {len(ids)} ids"
    return told


def told_text(path: str, events: list[dict[str, Any]]) -> str:
    if path == GENERATE:
        return str(events[-1]["text"])
    choices = [event["choices"][0] for event in events if event["choices"]]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def last_choice(told: Told) -> dict[str, Any]:
    return [event["choices"][0] for event in told.events if event["choices"]][-1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_greedy_text_goes_on_byte_for_byte(pairs, path, make, seed):
    told = await check(pairs, path, make(seed))

    # The random model makes bytes that are no characters: not every token is told at once.
    assert len(told.ids()) > 10


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_characters_of_several_tokens_are_never_cut(pairs, path, make, seed):
    words = "[\U0001f600-\U0001f64f\u4e2d-\u4eff\u00e4-\u00ff ]{30,40}"

    told = await check(pairs, path, make(seed, tokens=90, regex=words))

    text = told_text(path, told.events)
    assert len(text.encode()) > 1.8 * len(text)
    assert "\ufffd" not in text.rstrip("\ufffd")


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_a_json_schema_is_kept_across_the_break(pairs, path, make):
    schema = json.dumps(SCHEMA)
    fields = {"json_schema": schema} if path == GENERATE else {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    }  # fmt: skip

    told = await check(pairs, path, make(7, tokens=200, **fields))

    assert json.loads(told_text(path, told.events))["city"] in {"Paris", "Rome"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_tool_call_goes_on_event_by_event(pairs, choice):
    complete = 0
    for seed in (8, 9, 10):
        body = chat(seed, tokens=300, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        told = await check(pairs, CHAT, body)
        if last_choice(told)["finish_reason"] == "tool_calls":
            complete += 1
            arguments = json.loads("".join(call["function"]["arguments"] or "" for call in tool_calls(told)))
            assert arguments["city"] in {"Paris", "Rome", "Praha"}
            assert len(tool_calls(told)) > 2

    # The random model may fill its tokens with blanks instead.
    assert complete


def tool_calls(told: Told) -> list[dict[str, Any]]:
    deltas = [event["choices"][0]["delta"] for event in told.events if event["choices"]]
    return [call for delta in deltas for call in delta.get("tool_calls") or ()]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("penalty", [
    {"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
])  # fmt: skip
async def test_penalties_know_the_tokens_before_the_break(pairs, penalty, seed):
    await check(pairs, COMPLETIONS, completion(seed, tokens=60, **penalty))


async def test_a_stop_string_is_found_across_the_break(pairs):
    whole = told_text(COMPLETIONS, (await pairs[0].stream(COMPLETIONS, completion(1))).events)
    stopped = 0
    for length in (2, 3, 5, 8):
        stop = whole[len(whole) // 2 :][:length]
        told = await check(pairs, COMPLETIONS, completion(1, stop=[stop]))
        if last_choice(told)["finish_reason"] == "stop":
            stopped += 1
            assert told_text(COMPLETIONS, told.events) == whole[: whole.index(stop)]

    # SGLang overlooks a stop string that the model spells with more tokens than the tokenizer would.
    assert stopped


async def test_a_stop_pattern_may_begin_before_the_break_and_end_after_it(pairs):
    whole = told_text(COMPLETIONS, (await pairs[0].stream(COMPLETIONS, completion(1))).events)
    at = len(whole) // 2
    pattern = re.escape(whole[at]) + "[^\x00]{8,9}"

    told = await check(pairs, COMPLETIONS, completion(1, stop_regex=pattern))

    assert last_choice(told)["finish_reason"] == "stop"
    assert len(told_text(COMPLETIONS, told.events)) < len(whole)


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_when_all_output_tokens_were_told_only_the_end_is_missing(pairs, path, make):
    whole = await pairs[0].stream(path, make(2, tokens=41), kllm_token_ids=True)
    ids, fewer = whole.ids(), make(2, tokens=len(whole.ids()))

    alone = await pairs[0].stream(path, fewer)
    rest = await pairs[1].stream(path, fewer, kllm_token_ids=True, kllm_resume_output_ids=ids)

    assert rest.status == 200, rest.body
    assert [unit.ids for unit in rest.units] == [None]
    assert rest.units[-1].events[-1] == "[DONE]"
    assert timeless(rest.events[-1]) == timeless(alone.events[-1])
    if path != GENERATE:
        assert told_text(path, rest.events) == ""
        assert last_choice(rest)["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_no_ids_to_resume_are_a_new_stream(pairs, path, make):
    alone = await pairs[0].stream(path, make(3))
    told = await pairs[1].stream(path, make(3), kllm_resume_output_ids=[])

    assert shown(path, told.units) == shown(path, alone.units)
    assert all(unit.ids is None for unit in told.units)


async def test_log_probabilities_of_a_chat_go_on(pairs):
    body = chat(4, logprobs=True, top_logprobs=2)
    told = await pairs[0].stream(CHAT, body, kllm_token_ids=True)

    def tokens(events):
        choices = [event["choices"][0] for event in events if event["choices"]]
        return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]

    whole = tokens(told.events)
    for cut in cut_points(told):
        rest = await pairs[1].stream(CHAT, body, kllm_token_ids=True, kllm_resume_output_ids=told.ids(cut))
        before = [event for unit in told.units[:cut] for event in unit.events]
        joined = tokens([*before, *rest.events])
        assert [token["token"] for token in joined] == [token["token"] for token in whole]
        values = [[token["logprob"] for token in each] for each in (joined, whole)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


async def test_an_answer_of_several_choices_tells_no_ids(pairs):
    told = await pairs[0].stream(GENERATE, generation(5) | {"return_logprob": True}, kllm_token_ids=True)

    assert told.status == 200
    assert all(unit.ids is None for unit in told.units)


BAD_IDS = [
    {"kllm_resume_output_ids": "1,2"},
    {"kllm_resume_output_ids": [1, 512]},
    {"kllm_resume_output_ids": [1, -1]},
    {"kllm_resume_output_ids": [1, 1 << 40]},
    {"kllm_resume_output_ids": [1, None]},
    {"kllm_resume_output_ids": [20] * 41},
    {"kllm_resume_output_ids": [20] * 5000},
    {"kllm_token_ids": "yes"},
]


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda bad: str(bad)[:50])
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion), (GENERATE, generation)])
async def test_bad_ids_are_the_sender_s_fault_and_harm_nobody(pairs, path, make, bad):
    pair = pairs[0]
    for engine in (pair.prefill, pair.decode):
        for stream in (False, True):
            answer = await pair.post(engine, path, make(6) | bad | {"stream": stream})
            assert answer.status_code == 400, answer.text
            assert next(iter(bad)) in answer.json()["message"]


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)])
async def test_ids_that_break_the_grammar_are_refused_and_the_engines_go_on(pairs, path, make):
    body = make(6, regex="[a-f]{5,9}")

    told = await pairs[0].stream_alone(path, body, kllm_resume_output_ids=[300, 301])

    assert told.status == 400 or b"kllm_resume_output_ids does not follow" in told.body
    assert (await pairs[0].stream(path, body)).status == 200


async def test_sixteen_streams_break_at_once_and_all_go_on(pairs):
    bodies = [chat(100 + n, tokens=60, tools=[WEATHER]) if n % 2 else completion(100 + n, tokens=60) for n in range(16)]
    paths = [CHAT if n % 2 else COMPLETIONS for n in range(16)]
    told = await asyncio.gather(
        *(pairs[0].stream(path, body, kllm_token_ids=True) for path, body in zip(paths, bodies, strict=True))
    )
    cuts = [random.Random(number).choice(cut_points(each)) for number, each in enumerate(told)]

    rests = await asyncio.gather(
        *(
            pairs[1].stream(path, body, kllm_token_ids=True, kllm_resume_output_ids=each.ids(cut))
            for path, body, each, cut in zip(paths, bodies, told, cuts, strict=True)
        )
    )

    for path, each, cut, rest in zip(paths, told, cuts, rests, strict=True):
        assert rest.status == 200, rest.body
        assert shown(path, each.units[:cut] + rest.units) == shown(path, each.units)
