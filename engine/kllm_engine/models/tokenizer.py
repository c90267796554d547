"""Byte-level tokenizers of the demo models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers  # type: ignore[import-untyped]
from tokenizers.models import BPE  # type: ignore[import-untyped]


def byte_level_tokenizer(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]], special: Sequence[str]
) -> Tokenizer:
    """Byte-pair tokenizer that splits as GPT-2 does, with single digits.

    Args:
        vocabulary: tokens in byte-level spelling and their ids; special tokens included.
        merges: pairs in order of priority.
        special: tokens that text never produces by merging.
    """
    tokenizer = Tokenizer(BPE(vocab=dict(vocabulary), merges=list(merges), fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_configuration(*, bos: str, eos: str, chat_template: str, context_tokens: int) -> dict[str, Any]:
    """Content of tokenizer_config.json; `eos` must be the token that ends a turn."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": "<|endoftext|>",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": chat_template,
    }
