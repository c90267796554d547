"""`demo://tiny-random-llama`: a Llama with 148,000 random parameters, which serves in seconds and speaks nonsense.

Its weights are drawn wide, so that greedy output varies and a wrong KV cache shows in the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers  # type: ignore[import-untyped]

from kllm_engine.models.safetensors import write_float32
from kllm_engine.models.tokenizer import byte_level_tokenizer, tokenizer_configuration

RECIPE = "tiny-random-llama/1"
NEEDED_BYTES = 4 << 20

VOCABULARY = 512
_HIDDEN, _INNER, _LAYERS, _HEADS = 64, 128, 2, 4
_CONTEXT = 8192
_SPREAD = 0.2
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON_TEXT = (
    "the of and to in is that it for was on are as with his they be at one have this from or had by but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way about "
    "many then them would write like so these her long make thing see him two has look more day could go come did my "
    "sound no most number who over know water than call first people may down side been now find any new work part"
)


def build(folder: Path) -> None:
    """Write config, tokenizer and weights into `folder`; the same bytes each time."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    vocabulary, merges = _vocabulary()
    byte_level_tokenizer(vocabulary, merges, _SPECIAL).save(str(folder / "tokenizer.json"))
    configuration = tokenizer_configuration(
        bos=_SPECIAL[1], eos=_SPECIAL[2], chat_template=_CHAT_TEMPLATE, context_tokens=_CONTEXT
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=1))
    shapes = _shapes()
    write_float32(folder / "model.safetensors", shapes, _values(shapes))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, all bytes, then pairs of common words, left to right, until the vocabulary is full."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for word in _COMMON_TEXT.split():
        left = "Ġ"
        for letter in word:
            if left + letter not in known and len(tokens) < VOCABULARY:
                known.add(left + letter)
                tokens.append(left + letter)
                merges.append((left, letter))
            left += letter
    return {token: number for number, token in enumerate(tokens)}, merges


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (_HIDDEN, _HIDDEN)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (_INNER, _HIDDEN)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (_INNER, _HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (_HIDDEN, _INNER)
        shapes[f"{prefix}.input_layernorm.weight"] = (_HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (_HIDDEN,)
    shapes["model.norm.weight"] = (_HIDDEN,)
    shapes["lm_head.weight"] = (VOCABULARY, _HIDDEN)
    return shapes


def _values(shapes: dict[str, tuple[int, ...]]) -> Iterator[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if "norm" in name:
            yield np.ones(shape, dtype=np.float32)
        else:
            yield rng.normal(0.0, _SPREAD, shape).astype(np.float32)
