"""Breaks streams of SGLang's own chat handler after every chunk and goes on; prints one JSON object for each case.

A program of its own, because importing SGLang's server changes the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kllm_engine.cpu
from kllm_engine.sglang import resume
from kllm_engine.sglang.arguments import import_environment
from kllm_engine.sglang.chunks import ChunkStream
from kllm_engine.sglang.continuation import CHAT, Wish

os.environ.update(import_environment("cpu"))
sys.path.insert(0, str(Path(kllm_engine.cpu.__file__).parent / "stubs"))

from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

WEATHER = json.dumps(
    {"name": "get_weather", "arguments": {"city": "Paris \u00e9\U0001f600", "days": 2}}, ensure_ascii=False
)
OTHER = json.dumps({"name": "other", "arguments": {"x": "b"}})
REQUIRED = json.dumps(
    [
        {"name": "get_weather", "parameters": {"city": "Paris \u4e2d", "days": 2}},
        {"name": "other", "parameters": {"x": "a"}},
    ],
    ensure_ascii=False,
)
CASES = (
    ("pythonic", None, "auto", 'Hello \u00e9! [get_weather(city="Paris \u4e2d\U0001f600", days=2), other(x="y")]'),
    ("pythonic", None, "required", REQUIRED),
    ("pythonic", None, "auto", "no call, but [brackets] and (more"),
    ("qwen25", None, "auto", f"Sure.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>"),
    ("llama3", None, "auto", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}'),
    ("mistral", None, "auto", f"[TOOL_CALLS] [{WEATHER}]"),
    ("qwen3_coder", None, "auto",
     "ok <tool_call>\n<function=other>\n<parameter=x>\nb\n</parameter>\n</function>\n</tool_call>"),
    ("glm45", "glm45", "auto",
     "<think>hm</think>ok<tool_call>other\n<arg_key>x</arg_key>\n<arg_value>b</arg_value>\n</tool_call>"),
    ("qwen25", "qwen3", "auto",
     f"<think>Let me think \u00e9 about < it</think>Answer <tool_call>\n{OTHER}\n</tool_call>"),
    ("qwen25", "deepseek-r1", "auto", "thinking \u00e9... hm </think>Answer here < b"),
)  # fmt: skip
FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("get_weather", "other")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]

Unit = tuple[list[int], list[Any]]


class Tokenizer:
    """Each id is a byte."""

    is_fast = True

    def __len__(self):
        return 256

    def decode(self, ids, **_: Any) -> str:
        return bytes(list(ids)).decode(errors="replace")

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


class Manager:
    """SGLang's TokenizerManager with an engine that says the rest of a text, some bytes at a time."""

    def __init__(self, text: str, *, told: int, pace: int, reasoning_parser: str | None) -> None:
        self.tokenizer = Tokenizer()
        self.incremental_streaming_output = False
        self.server_args = SimpleNamespace(reasoning_parser=reasoning_parser)
        self.model_config = SimpleNamespace(vocab_size=256)
        self.preferred_sampling_params = None
        self._output, self._pace = list(text.encode())[told:], pace

    def generate_request(self, obj: Any, request: Any) -> Any:
        return resume.generate_request(self._generate, self, obj, request)

    async def _generate(self, _manager: Any, obj: Any, _request: Any) -> Any:
        for count in [*range(self._pace, len(self._output), self._pace), len(self._output)]:
            ids, ended = self._output[:count], count == len(self._output)
            yield {
                "text": bytes(ids).decode(errors="ignore"), "output_ids": ids,
                "meta_info": {
                    "id": "r", "finish_reason": {"type": "stop", "matched": 2} if ended else None,
                    "prompt_tokens": len(obj.input_ids), "completion_tokens": count, "cached_tokens": 0,
                },
            }  # fmt: skip


def handler(manager: Manager, tool_parser: str, reasoning_parser: str | None) -> Any:
    """SGLang's own, without the server around it."""
    made: Any = serving_chat.OpenAIServingChat.__new__(serving_chat.OpenAIServingChat)
    made.tokenizer_manager = manager
    made.tool_call_parser, made.reasoning_parser, made.chat_encoding_spec = tool_parser, reasoning_parser, None
    made.template_manager = SimpleNamespace(force_reasoning=False, reasoning_config=None)
    made._get_reasoning_from_request = lambda _: True
    return made


async def stream(case: tuple[str, str | None, str, str], resumed: list[int], pace: int) -> list[Unit]:
    """The chunks of one response."""
    tool_parser, reasoning_parser, choice, text = case
    manager = Manager(text, told=len(resumed), pace=pace, reasoning_parser=reasoning_parser)
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True, tools=TOOLS, tool_choice=choice,
        input_ids=[1, 2], stream_options={"include_usage": True},
    )  # fmt: skip
    obj = SimpleNamespace(
        rid="r", input_ids=[1, 2], stream=True, return_logprob=False, return_hidden_states=False,
        return_routed_experts=False, return_sampling_mask=False, sampling_params={"max_new_tokens": 9999},
    )  # fmt: skip
    chunks, bodies = ChunkStream(), []

    async def send(message: dict[str, Any]) -> None:
        bodies.append(message["body"])

    sending = chunks.begin(send)
    scope = {"path": CHAT, "kllm.wish": Wish(True, resumed, True), "kllm.chunks": chunks}
    events = handler(manager, tool_parser, reasoning_parser)._generate_chat_stream(
        obj, request, SimpleNamespace(scope=scope, headers={})
    )
    async for event in events:
        await sending({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await sending({"type": "http.response.body", "body": b"", "more_body": False})
    return [unit(body) for body in bodies]


def unit(body: bytes) -> Unit:
    *events, _ = body.split(b"\n\n")
    ids = []
    if events[0].startswith(b": kllm-ids "):
        ids = [int(token) for token in events.pop(0).rpartition(b" ")[2].split(b",")]
    return ids, [plain(event.removeprefix(b"data: ").decode()) for event in events]


def plain(event: str) -> Any:
    """An event without the time and the random ids of calls."""
    if event == "[DONE]":
        return event
    told = json.loads(event)
    del told["created"]
    for choice in told["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            call["id"] = call["id"] is not None
    return told


async def examine(case: tuple[str, str | None, str, str]) -> dict[str, Any]:
    """Let tokens come together in different ways, break the case's stream after every chunk, and go on."""
    whole = await stream(case, [], 1)
    expected = [event for _, events in whole for event in events]
    wrong = []
    for pace in (1, 3, 5, 1000):
        told = await stream(case, [], pace)
        if [event for _, events in told for event in events] != expected:
            wrong.append(f"{pace} tokens at a time")
        for cut in range(1, len(told)):
            ids = [token for ids, _ in told[:cut] for token in ids]
            rest = await stream(case, ids, 1 + cut % 4)
            if [event for _, events in told[:cut] + rest for event in events] != expected:
                wrong.append(f"{pace} tokens at a time, after {len(ids)} ids")
    calls = [choice["delta"].get("tool_calls") for event in expected[:-1] for choice in event["choices"]]
    return {"parsers": case[:3], "chunks": len(whole), "calls": sum(map(bool, calls)), "wrong": wrong}


def main() -> None:
    serving = dict.fromkeys(
        ("incremental_streaming_output", "stream_response_default_include_usage", "enable_cache_report",
         "return_input_ids", "return_output_ids"), False,
    )  # fmt: skip
    serving_chat.get_serving = lambda: SimpleNamespace(**serving)
    for case in CASES:
        sys.stdout.write(json.dumps(asyncio.run(examine(case))) + "\n")


if __name__ == "__main__":
    main()
