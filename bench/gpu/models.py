"""A Llama of 8 billion parameters without weights: SGLang makes random ones with `load-format: dummy`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHANGES_FOR_A_REHEARSAL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def dummy_llama(folder: Path, tokenizer_of: Path, changes: dict[str, int]) -> Path:
    """Write the model's folder, with the tokenizer of another one and changes to the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name in TOKENIZER_FILES:
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
    # kLLM looks for weights before it starts anything; this file holds none.
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder
