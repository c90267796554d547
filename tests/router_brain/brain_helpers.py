"""A small tokenizer with a template, loads, and waiting for a condition."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kllm_core.fleet import EngineLoad, Instance, InstanceState
from kllm_core.objectives import Role

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WHOLE_MESSAGES = (
    "{{ bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for message in messages %}\n"
    "    {{ message | tojson }}{{ message['content'] | trim }}{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}"
    "{{ strftime_now('%Y') }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for content in message['content'] %}[{{ content.type }}:{{ content.text }}]"
    "{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}{{ call | tojson }}"
    "{{ call.function.arguments.city }}{% endfor %}{{ message | tojson }}"
    "{% generation %}x{% endgeneration %}<|im_end|>\n"
    "{% if loop.index > 50 %}{% break %}{% endif %}{% endfor %}{{ foo }}"
)

BARE_FUNCTIONS = (
    "{% for t in tools or [] %}{% if t.function %}{{ raise_exception('bare functions, please') }}{% endif %}"
    "{{ t.name }}"
    "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wétter",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]

_TRAINING = [
    "Hello world, what is the capital of France? Paris.",
    "user assistant system content role 0123456789",
    "Grüße",
]


def write_model(
    folder: Path,
    *,
    template: str | list[dict[str, str]] | None = CHATML,
    template_file: bool = False,
    config: dict[str, Any] | None = None,
    context: int = 4096,
) -> Path:
    """A model folder without weights: 512-token byte-level BPE."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False, **(config or {}),
    }  # fmt: skip
    if template is not None and template_file:
        (folder / "chat_template.jinja").write_text(str(template))
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 512, "max_position_embeddings": context, "model_type": "llama"})
    )
    return folder


def instance(
    instance_id: str, role: Role = Role.PREFILL, state: InstanceState = InstanceState.SERVING, **load: Any
) -> Instance:
    """An instance; without load fields its load is unknown."""
    return Instance(instance_id, role, state, load=EngineLoad(age_seconds=0.0, **load) if load else None)


async def wait_until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.005)
