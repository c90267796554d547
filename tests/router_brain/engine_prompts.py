"""Run as a program: SGLang's own code from bodies to token ids, without a server and without a GPU.

Reads {"folders": {name: path}, "bodies": {name: body}, "texts": [text]} from stdin and writes
{name: {"chats": {name: ids}, "texts": [ids]}} as the last line of stdout. It is a process of its own, because importing
SGLang takes 15 s and half a gigabyte and changes the process.
"""

from __future__ import annotations

import copy
import json
import sys
import types
import warnings
from typing import Any

warnings.simplefilter("ignore")

import sglang.srt.parser.template_manager as template_manager  # noqa: E402
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: E402
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer  # noqa: E402


def serving(folder: str) -> OpenAIServingChat:
    """The chat endpoint as it is set up for a model without parsers."""
    tokenizer = get_tokenizer(folder)
    manager = types.SimpleNamespace(tokenizer=tokenizer, processor=None, served_model_name="m")
    templates = template_manager.TemplateManager()
    templates.load_chat_template(manager, None, folder)
    made = OpenAIServingChat.__new__(OpenAIServingChat)
    made.__dict__.update(
        tokenizer_manager=manager, template_manager=templates, tool_call_parser=None, reasoning_parser=None,
        default_chat_template_kwargs={}, _reasoning_detector=None, is_gpt_oss=False, is_gemma4=False,
        chat_encoding_spec=None, _tokenizer_auto_adds_specials=len(tokenizer.encode("")) > 0,
    )  # fmt: skip
    made._prompt_text_round_trip_is_lossy = made._probe_prompt_text_round_trip()
    return made


def chat_ids(made: OpenAIServingChat, body: dict[str, Any]) -> list[int]:
    """Ids of a chat; the first lines are those of the endpoint before it renders."""
    request = ChatCompletionRequest(**copy.deepcopy(body))
    effort = (request.chat_template_kwargs or {}).pop("reasoning_effort", None)
    if effort is not None:
        request.reasoning_effort = effort
    return list(made._process_messages(request, False).prompt_ids)


def main() -> None:
    """Answer the one question on stdin."""
    asked = json.load(sys.stdin)
    template_manager.get_serving = lambda: types.SimpleNamespace(hf_chat_template_name=None)
    answers = {}
    for name, folder in asked["folders"].items():
        made = serving(folder)
        answers[name] = {
            "chats": {case: chat_ids(made, body) for case, body in asked["bodies"].items()},
            "texts": [made.tokenizer_manager.tokenizer(text)["input_ids"] for text in asked["texts"]],
        }
    sys.stdout.write("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
