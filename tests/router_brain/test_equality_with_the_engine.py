"""Prompts that the router makes are, id by id, those that SGLang makes of the same body."""

from __future__ import annotations

import copy
import importlib
import sys
import types
import warnings
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
                           {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    "assistant last": {"messages": [HI, {"role": "assistant", "content": "Sure, "}]},
    "continued": {"messages": [HI, {"role": "assistant", "content": "Sure, "}], "continue_final_message": True},
    "tools": {"messages": [{"role": "user", "content": "Hi", "name": "bob"},
                           {"role": "Assistant", "content": None, "tool_calls": [CALLED]},
                           {"role": "tool", "tool_call_id": "c1",
                            "content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]}],
              "tools": TOOLS},
    "named tool": {"messages": [HI], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
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
    "named templates": {"template": [{"name": "default", "template": WHOLE_MESSAGES}, {"name": "tool_use", "template": PARTS}]},
    "bos added": {"template": WHOLE_MESSAGES, "config": {"tokenizer_class": "LlamaTokenizerFast"}},
    "bos not added": {"template": CHATML, "config": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}},
}  # fmt: skip


class Engine:
    """SGLang's own code from a chat body to token ids, without a server."""

    def __init__(self, folder: Path) -> None:
        load = importlib.import_module("sglang.srt.utils.hf_transformers.tokenizer").get_tokenizer
        serving = importlib.import_module("sglang.srt.entrypoints.openai.serving_chat").OpenAIServingChat
        manager = importlib.import_module("sglang.srt.parser.template_manager").TemplateManager()
        self._request = importlib.import_module("sglang.srt.entrypoints.openai.protocol").ChatCompletionRequest
        self.tokenizer = load(str(folder))
        tokenizer_manager = types.SimpleNamespace(tokenizer=self.tokenizer, processor=None, served_model_name="m")
        manager.load_chat_template(tokenizer_manager, None, str(folder))
        made = serving.__new__(serving)
        made.__dict__.update(
            tokenizer_manager=tokenizer_manager, template_manager=manager, tool_call_parser=None, reasoning_parser=None,
            default_chat_template_kwargs={}, _reasoning_detector=None, is_gpt_oss=False, is_gemma4=False,
            chat_encoding_spec=None, _tokenizer_auto_adds_specials=len(self.tokenizer.encode("")) > 0,
        )  # fmt: skip
        made._prompt_text_round_trip_is_lossy = made._probe_prompt_text_round_trip()
        self._serving = made

    def ids(self, body: dict[str, Any]) -> list[int]:
        request = self._request(**copy.deepcopy(body))
        effort = (request.chat_template_kwargs or {}).pop("reasoning_effort", None)
        if effort is not None:
            request.reasoning_effort = effort
        return list(self._serving._process_messages(request, False).prompt_ids)


@pytest.fixture(scope="module")
def sglang() -> Iterator[None]:
    """SGLang imported without a GPU; it takes about 15 s."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    patch.syspath_prepend(str(STUBS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("sglang.srt.parser.template_manager")
        importlib.import_module("sglang.srt.entrypoints.openai.serving_chat")
    patch.setattr(module, "get_serving", lambda: types.SimpleNamespace(hf_chat_template_name=None))
    yield
    patch.undo()
    sys.modules.pop("sgl_kernel", None)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, sglang: None, tmp_path_factory: pytest.TempPathFactory):
    folder = write_model(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(folder)
    return engine, OpenAiPreparer.load(folder, "m")


@pytest.mark.parametrize("case", BODIES)
async def test_a_chat_has_the_ids_that_the_engine_would_make(pair: tuple[Engine, OpenAiPreparer], case: str):
    engine, preparer = pair
    body = {"model": "m"} | BODIES[case]
    wanted = engine.ids(body)

    request = await preparer.prepare("/v1/chat/completions", orjson.dumps(body))

    assert list(request.input_ids) == wanted


@pytest.mark.parametrize("text", ["Hello", "  a  b\n\n\tc 123 456", "你好<|im_end|>x", "é\u0301 🙂"])
async def test_a_completion_has_the_ids_that_the_engine_would_make(pair: tuple[Engine, OpenAiPreparer], text: str):
    engine, preparer = pair

    request = await preparer.prepare("/v1/completions", orjson.dumps({"model": "m", "prompt": text}))

    assert list(request.input_ids) == engine.tokenizer(text)["input_ids"]
