"""Prompts that the router makes are, id by id, those that SGLang makes of the same body."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_brain.brain_helpers import BARE_FUNCTIONS, CHATML, PARTS, TOOLS, WHOLE_MESSAGES, write_model

from kllm_router.frontend.openai import OpenAiPreparer

STUBS = Path(__file__).parents[2] / "engine" / "kllm_engine" / "cpu" / "stubs"

CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
HI = {"role": "user", "content": "Hi"}

BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "Hello wörld 你好 <|im_start|> \u2028 x"}]},
    "parts": {"messages": [{"role": "system", "content": "S"},
                           {"role": "user",
                            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    "assistant last": {"messages": [HI, {"role": "assistant", "content": "Sure, "}]},
    "continued": {"messages": [HI, {"role": "assistant", "content": "Sure, "}], "continue_final_message": True},
    "tools": {"messages": [{"role": "user", "content": "Hi", "name": "bob"},
                           {"role": "Assistant", "content": None, "tool_calls": [CALLED]},
                           {"role": "tool", "tool_call_id": "c1",
                            "content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]}],
              "tools": TOOLS},
    "named tool": {"messages": [HI], "tools": TOOLS,
                   "tool_choice": {"type": "function", "function": {"name": "clock"}}},
    "no tool": {"messages": [HI], "tools": TOOLS, "tool_choice": "none"},
    "required": {"messages": [HI], "tools": TOOLS, "tool_choice": "required"},
    "arguments": {"messages": [HI], "chat_template_kwargs": {"enable_thinking": False, "foo": "bar"}},
    "low effort": {"messages": [HI], "reasoning_effort": "low"},
    "no effort": {"messages": [HI], "reasoning_effort": "none"},
    "effort in arguments": {"messages": [HI], "chat_template_kwargs": {"reasoning_effort": "high"}},
    "reasoning": {"messages": [HI], "reasoning": {"effort": "high", "enabled": True}},
    "thoughts": {"messages": [{"role": "developer", "content": "Be nice", "name": "d"}, {"role": "user", "content": ""},
                              {"role": "assistant", "reasoning_content": "rc",
                               "content": [{"type": "text", "text": "x"}, {"type": "thinking", "thinking": "t"}]},
                              {"role": "user", "content": "go"}]},
    "tools in a message": {"messages": [{"role": "system", "content": "S", "tools": TOOLS}, HI]},
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "chatml": {"template": CHATML},
    "template file": {"template": CHATML, "template_file": True},
    "whole messages": {"template": WHOLE_MESSAGES},
    "content parts": {"template": PARTS},
    "bare functions": {"template": BARE_FUNCTIONS},
    "named templates": {"template": [{"name": "default", "template": WHOLE_MESSAGES},
                                     {"name": "tool_use", "template": PARTS}]},
    "bos added": {"template": WHOLE_MESSAGES, "config": {"tokenizer_class": "LlamaTokenizerFast"}},
    "bos not added": {"template": CHATML, "config": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}},
}  # fmt: skip


TEXTS = ["Hello", "  a  b\n\n\tc 123 456", "你好<|im_end|>x", "é\u0301 🙂"]


DEMO_MODELS = ("tiny-random-llama", "smollm2-135m")
CACHE = Path(tempfile.gettempdir()) / "kllm-test-models"  # kept between runs: SmolLM2 is half a gigabyte


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: write_model(tmp_path_factory.mktemp("model"), **options) for name, options in MODELS.items()}
    return made | {name: demo_model(name) for name in DEMO_MODELS}


@pytest.fixture(scope="module")
def preparers(folders: dict[str, Path]) -> Iterator[dict[str, OpenAiPreparer]]:
    made = {name: OpenAiPreparer.load(folder, "m") for name, folder in folders.items()}
    yield made
    for preparer in made.values():
        preparer.close()


def demo_model(name: str) -> Path:
    command = [sys.executable, "-m", "kllm_engine.main", "model", f"demo://{name}", "--cache", str(CACHE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(json.loads(done.stdout.splitlines()[-1])["path"])


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> dict[str, Any]:
    """What the engine makes of all bodies with all models; it takes about 20 s."""
    pytest.importorskip("sglang.version", reason="the engine is not installed")
    asked = {
        "folders": {name: str(folder) for name, folder in folders.items()},
        "bodies": {name: {"model": "m"} | body for name, body in BODIES.items()},
        "texts": TEXTS,
    }
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(STUBS)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_prompts.py"))],
        input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=240, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("model", [*MODELS, *DEMO_MODELS])
async def test_a_chat_has_the_ids_that_the_engine_would_make(preparers, engine, model: str, case: str):
    request = await preparers[model].prepare("/v1/chat/completions", orjson.dumps({"model": "m"} | BODIES[case]))

    assert list(request.input_ids) == engine[model]["chats"][case]


@pytest.mark.parametrize("model", [*MODELS, *DEMO_MODELS])
async def test_a_completion_has_the_ids_that_the_engine_would_make(preparers, engine, model: str):
    for text, wanted in zip(TEXTS, engine[model]["texts"], strict=True):
        request = await preparers[model].prepare("/v1/completions", orjson.dumps({"model": "m", "prompt": text}))
        assert list(request.input_ids) == wanted
