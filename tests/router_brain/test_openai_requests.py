from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_brain.brain_helpers import CHATML, TOOLS, write_model

from kllm_router.frontend.openai import OpenAiPreparer
from kllm_router.frontend.tokenizer import ModelFilesError
from kllm_router.interfaces import ApiError, EngineRequest
from kllm_router.limits import RequestLimits

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def preparer(folder: Path) -> OpenAiPreparer:
    return OpenAiPreparer.load(folder, "test-model", created=7)


async def prepared(preparer: OpenAiPreparer, path: str = CHAT, **fields: Any) -> EngineRequest:
    base: dict[str, Any] = {"model": "test-model"}
    base |= {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    return await preparer.prepare(path, json.dumps(base | fields).encode())


async def refused(preparer: OpenAiPreparer, path: str = CHAT, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await prepared(preparer, path, **fields)
    return caught.value


async def test_a_chat_becomes_ids_and_keeps_its_fields(preparer: OpenAiPreparer):
    request = await prepared(
        preparer,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=9,
        top_k=5,
        ebnf="root ::= 'x'",
        user=None,
    )

    assert request.body["input_ids"] == request.input_ids
    assert preparer.model.tokenizer.decode(list(request.input_ids)).startswith("system\nYou are")
    assert {name: request.body[name] for name in ("top_k", "ebnf", "max_tokens")} == {
        "top_k": 5, "ebnf": "root ::= 'x'", "max_tokens": 9,
    }  # fmt: skip
    assert not {"stream", "stream_options", "rid", "user"} & set(request.body)
    assert (request.stream, request.include_usage, request.max_new_tokens) == (True, True, 9)
    assert len(request.rid) == 32
    assert request.rid != (await prepared(preparer)).rid


async def test_a_completion_becomes_ids(preparer: OpenAiPreparer):
    request = await prepared(preparer, COMPLETIONS, prompt="Hello world")

    assert request.body["prompt"] == request.input_ids == preparer.model.tokenizer.encode("Hello world")
    assert request.max_new_tokens == 16
    assert list((await prepared(preparer, COMPLETIONS, prompt=[3, 4, 5])).input_ids) == [3, 4, 5]
    assert list((await prepared(preparer, COMPLETIONS, prompt=[[3, 4]])).input_ids) == [3, 4]
    assert (await prepared(preparer, COMPLETIONS, prompt=["Hello world"])).input_ids == request.input_ids


async def test_a_cache_salt_is_part_of_the_request(preparer: OpenAiPreparer):
    assert (await prepared(preparer, cache_salt="tenant")).salt == "tenant"


async def test_listeners_hear_of_valid_requests_only(folder: Path):
    heard: list[EngineRequest] = []
    preparer = OpenAiPreparer.load(folder, "test-model")
    preparer.listeners.append(heard.append)

    request = await prepared(preparer)
    await refused(preparer, temperature=9)

    assert heard == [request]


async def test_models_are_listed_in_openais_form(preparer: OpenAiPreparer):
    (model,) = preparer.models()

    assert {name: model[name] for name in ("id", "object", "created", "owned_by")} == {
        "id": "test-model", "object": "model", "created": 7, "owned_by": "kllm",
    }  # fmt: skip
    assert model["max_model_len"] == 4096


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no model": (CHAT, {"model": None}, "model"),
    "model number": (CHAT, {"model": 3}, "model"),
    "no messages": (CHAT, {"messages": None}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "message text": (CHAT, {"messages": ["x"]}, "messages[0]"),
    "role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "role case": (CHAT, {"messages": [{"role": "User", "content": "x"}]}, "messages[0].role"),
    "user without content": (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    "content number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
              "messages[0].content[0].type"),
    "part without text": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                          "messages[0].content[0].text"),
    "arguments": (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    "NUL": (CHAT, {"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
    "NUL in a name": (CHAT, {"chat_template_kwargs": {"a\0": 1}}, "chat_template_kwargs"),
    "temperature": (CHAT, {"temperature": 2.1}, "temperature"),
    "temperature text": (CHAT, {"temperature": "hot"}, "temperature"),
    "temperature bool": (CHAT, {"temperature": True}, "temperature"),
    "top_p": (CHAT, {"top_p": 0}, "top_p"),
    "top_k": (CHAT, {"top_k": 0}, "top_k"),
    "max_tokens": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "max_tokens fraction": (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    "max_tokens beyond integers": (CHAT, {"max_tokens": 10**30}, "max_tokens"),
    "max_completion_tokens": (CHAT, {"max_completion_tokens": 10**12}, "max_completion_tokens"),
    "min_tokens": (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    "stop": (CHAT, {"stop": ["a", 1]}, "stop"),
    "too many stops": (CHAT, {"stop": ["a"] * 33}, "stop"),
    "a long stop": (CHAT, {"stop": ["a" * 257]}, "stop"),
    "a stop pattern": (CHAT, {"stop_regex": "(.|..)+x"}, "stop_regex"),
    "a huge grammar": (CHAT, {"ebnf": "root ::= " + '"a" ' * 20_000}, "ebnf"),
    "a huge schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object", "properties": {f"p{n}": {} for n in range(8000)}},
        }}},
        "response_format",
    ),
    "stream": (CHAT, {"stream": "yes"}, "stream"),
    "stream_options without stream": (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    "n": (CHAT, {"n": 2}, "n"),
    "best_of": (COMPLETIONS, {"best_of": 2}, "best_of"),
    "seed": (CHAT, {"seed": 2**63}, "seed"),
    "logit_bias outside": (CHAT, {"logit_bias": {"512": 1}}, "logit_bias"),
    "logit_bias name": (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    "logit_bias value": (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    "stop_token_ids": (CHAT, {"stop_token_ids": [512]}, "stop_token_ids"),
    "top_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "echo with logprobs": (COMPLETIONS, {"echo": True, "logprobs": 1}, "logprobs"),
    "suffix": (COMPLETIONS, {"suffix": "x"}, "suffix"),
    "tools": (CHAT, {"tools": {}}, "tools"),
    "tool without name": (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "tool_choice": (CHAT, {"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
    "unknown tool": (CHAT, {"tools": TOOLS,
                            "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    "required without tools": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "response_format": (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
    "schema missing": (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    "two constraints": (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    "template name": (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    "reasoning_effort": (CHAT, {"reasoning_effort": "enormous"}, "reasoning_effort"),
    "functions": (CHAT, {"functions": []}, "functions"),
    "audio": (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    "no prompt": (COMPLETIONS, {"prompt": None}, "prompt"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, "prompt"),
    "empty ids": (COMPLETIONS, {"prompt": []}, "prompt"),
    "two prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    "two id prompts": (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
    "id outside": (COMPLETIONS, {"prompt": [1, 512]}, "prompt"),
    "negative id": (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    "id text": (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    "id bool": (COMPLETIONS, {"prompt": [True]}, "prompt"),
    "deep": (CHAT, {"tools": json.loads("[" * 70 + "]" * 70)}, "tools"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_field_is_refused_by_name(preparer: OpenAiPreparer, case: str):
    path, fields, param = WRONG[case]

    error = await refused(preparer, path, **fields)

    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert error.param is not None
    assert error.param.startswith(param)
    assert error.message


ROUTING = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "rid",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "custom_logit_processor",
    "custom_params",
    "input_ids",
    "input_embeds",
    "session_params",
    "lora_path",
    "return_hidden_states",
    "extra_key",
    "resume_output_ids",
    "priority",
]


@pytest.mark.parametrize("name", ROUTING)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_clients_cannot_reach_into_the_engine(preparer: OpenAiPreparer, path: str, name: str):
    for value in ("x", 0, [1], True):
        error = await refused(preparer, path, **{name: value})
        assert (error.status, error.param) == (400, name)
    assert name not in (await prepared(preparer, path, **{name: None})).body or name == "input_ids"


@pytest.mark.parametrize(
    "body", [b"", b" ", b"{", b"[]", b"1", b'"x"', b'{"model": NaN}', b"\xff", b'{"a": "\\ud800"}', b"[" * 5000]
)
async def test_what_is_not_a_json_object_is_refused(preparer: OpenAiPreparer, body: bytes):
    with pytest.raises(ApiError) as caught:
        await preparer.prepare(CHAT, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


async def test_an_escaped_backslash_before_u0000_is_no_nul(preparer: OpenAiPreparer):
    await prepared(preparer, messages=[{"role": "user", "content": "a\\u0000b"}])


async def test_another_model_is_not_found(preparer: OpenAiPreparer):
    error = await refused(preparer, model="other")

    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


async def test_more_than_the_context_is_refused_in_openais_words(preparer: OpenAiPreparer):
    many = [{"role": "user", "content": "zq" * 4096}]
    for fields in ({"messages": many}, {"messages": HELLO, "max_tokens": 4090}):
        error = await refused(preparer, **fields)
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "maximum context length is 4096 tokens" in error.message


async def test_a_huge_text_is_refused_before_it_is_tokenised(preparer: OpenAiPreparer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparer.model.tokenizer, "encode", lambda _: pytest.fail("was tokenised"))
    monkeypatch.setattr(preparer.model.tokenizer, "encode_rendered", lambda _: pytest.fail("was tokenised"))
    text = "x" * (4096 * 64 + 1)

    for error in (
        await refused(preparer, COMPLETIONS, prompt=text),
        await refused(preparer, messages=[{"role": "user", "content": text}]),
    ):
        assert error.code == "context_length_exceeded"


async def test_the_smallest_known_limit_holds(folder: Path):
    limits = RequestLimits(context_tokens=100, kv_tokens=64)
    preparer = OpenAiPreparer.load(folder, "test-model", limits=lambda: limits)

    await prepared(preparer, COMPLETIONS, prompt=[1] * 32, max_tokens=32)
    error = await refused(preparer, COMPLETIONS, prompt=[1] * 32, max_tokens=33)

    assert "64 tokens" in error.message


async def test_a_model_without_a_template_takes_completions_only(tmp_path: Path):
    preparer = OpenAiPreparer.load(write_model(tmp_path, template=None), "test-model")

    assert "no chat template" in (await refused(preparer)).message
    assert (await prepared(preparer, COMPLETIONS)).input_ids


async def test_a_template_that_refuses_is_the_clients_error(tmp_path: Path):
    template = CHATML + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    preparer = OpenAiPreparer.load(write_model(tmp_path, template=template), "test-model")

    error = await refused(preparer, messages=[{"role": "system", "content": "x"}])

    assert (error.status, error.param) == (400, "messages")
    assert "no system, please" in error.message


def test_a_folder_without_its_files_is_named(tmp_path: Path):
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        OpenAiPreparer.load(tmp_path, "x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        OpenAiPreparer.load(tmp_path, "x")
    write_model(tmp_path, template="{% for %}")
    with pytest.raises(ModelFilesError, match="line 1"):
        OpenAiPreparer.load(tmp_path, "x")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from(
    ["messages", "prompt", "model", "max_tokens", "stop", "tools", "tool_choice", "logit_bias", "response_format",
     "stream_options", "chat_template_kwargs", "reasoning", "reasoning_effort", "stop_token_ids", "cache_salt", "top_k",
     "anything"]
)  # fmt: skip


@given(path=st.sampled_from([CHAT, COMPLETIONS]), fields=st.dictionaries(NAMES, JSON, max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_a_body_holds_it_is_prepared_or_refused(
    preparer: OpenAiPreparer, path: str, fields: dict[str, Any]
):
    try:
        body = orjson.dumps({"model": "test-model", "messages": HELLO, "prompt": "x"} | fields)
    except (TypeError, orjson.JSONEncodeError):
        return
    try:
        ids = (await preparer.prepare(path, body)).input_ids
    except ApiError as error:
        ids = [0] if error.status in {400, 404} else [-1]
    assert all(0 <= token < 512 for token in ids)
