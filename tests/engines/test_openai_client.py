"""The real `openai` client against real engines."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI
from plain_server import PlainServer
from service_under_test import Service

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("idle_afterwards")]

MODEL = "test-model"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def client(service: Service):
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def streamed(client: AsyncOpenAI, **arguments):
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, stream=True, temperature=0, **({"messages": QUESTION} | arguments)
        )
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, chunks


async def test_models_lists_the_served_name(client: AsyncOpenAI):
    assert [model.id async for model in await client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_stream_and_a_whole_answer_say_what_a_plain_server_says(client: AsyncOpenAI, plain: PlainServer):
    whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    text, chunks = await streamed(client, max_tokens=32)
    reference = await plain.post(
        "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    )

    assert whole.choices[0].message.content == text == reference["choices"][0]["message"]["content"]
    assert whole.usage.prompt_tokens == reference["usage"]["prompt_tokens"]
    assert whole.usage.completion_tokens == reference["usage"]["completion_tokens"] == 32
    assert whole.choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_usage_comes_with_a_stream_only_when_it_is_asked_for(client: AsyncOpenAI):
    _, without = await streamed(client, max_tokens=8)
    _, chunks = await streamed(client, max_tokens=8, stream_options={"include_usage": True})

    assert all(chunk.usage is None for chunk in without)
    assert all(chunk.choices for chunk in without)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.total_tokens == 8 + chunks[-1].usage.prompt_tokens


async def test_a_stop_string_ends_the_answer_before_it(client: AsyncOpenAI):
    whole, _ = await streamed(client, max_tokens=32)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]

    text, chunks = await streamed(client, max_tokens=32, stop=[stop])
    at_once = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32, stop=stop
    )

    assert text == at_once.choices[0].message.content == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == at_once.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 17])
async def test_max_tokens_is_kept(client: AsyncOpenAI, limit):
    whole = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=limit, extra_body={"ignore_eos": True}
    )

    assert whole.usage.completion_tokens == limit
    assert whole.choices[0].finish_reason == "length"


async def test_a_json_schema_is_kept(client: AsyncOpenAI):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"enum": [1, 2, 3]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}

    whole = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=400, response_format=response_format
    )
    text, _ = await streamed(client, max_tokens=400, response_format=response_format)

    for answer in (whole.choices[0].message.content, text):
        parsed = json.loads(answer)
        assert parsed["city"] in {"Paris", "Rome"}
        assert parsed["size"] in {1, 2, 3}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_required_tool_is_called_with_valid_arguments(client: AsyncOpenAI, choice):
    whole = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=400,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
    )

    call = whole.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in {"Paris", "Rome"}
    assert arguments["days"] in {1, 2}
    assert whole.choices[0].finish_reason == "tool_calls"


async def test_a_streamed_tool_call_adds_up_to_valid_arguments(client: AsyncOpenAI):
    _, chunks = await streamed(
        client, max_tokens=400, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )

    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "get_weather"
    arguments = json.loads("".join(call.function.arguments or "" for call in calls))
    assert arguments["city"] in {"Paris", "Rome"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_an_earlier_tool_call_is_taken_back_into_the_conversation(client: AsyncOpenAI):
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]

    whole = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=8, temperature=0
    )

    assert whole.usage.completion_tokens > 0


async def test_completions_take_text_and_token_ids(client: AsyncOpenAI, plain: PlainServer):
    body = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    reference = await plain.post("/v1/completions", body)

    whole = await client.completions.create(**body)
    chunks = [chunk async for chunk in await client.completions.create(**body, stream=True)]
    by_ids = await client.completions.create(**(body | {"prompt": [11, 12, 13, 14]}))

    assert whole.choices[0].text == reference["choices"][0]["text"]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.prompt_tokens == reference["usage"]["prompt_tokens"]
    assert by_ids.usage.prompt_tokens == 4


async def test_sixteen_streams_at_once_are_all_whole(client: AsyncOpenAI):
    questions = [[{"role": "user", "content": f"Tell me about the number {n}."}] for n in range(16)]
    alone = [(await streamed(client, messages=question, max_tokens=16))[0] for question in questions]

    together = await asyncio.gather(*(streamed(client, messages=question, max_tokens=16) for question in questions))

    assert [text for text, _ in together] == alone


async def test_errors_are_those_that_the_client_library_knows(client: AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, n=2)

    assert unknown.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert wrong.value.param == "temperature"
    assert unsupported.value.param == "n"
