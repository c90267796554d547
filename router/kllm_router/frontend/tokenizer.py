"""The model's tokenizer, loaded from its folder as the engine loads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, processors  # type: ignore[import-untyped]

from kllm_router.frontend.pieces import PieceCache

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CLASSES_WITH_BOS_FLAG = frozenset(
    {
        "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizer",
        "GemmaTokenizerFast", "CohereTokenizerFast",
    }
)  # fmt: skip
"""Tokenizer classes whose `add_bos_token` (true when absent) the engine puts over the file's post-processor."""


class ModelFilesError(ValueError):
    """The model's folder lacks a file, or it cannot be read; the message names it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        ModelFilesError: it is there and is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFilesError(f"{path}: {error.strerror}") from error
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ModelFilesError(f"{path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return parsed


class ModelTokenizer:
    """Text to ids. Safe to use from several threads.

    Attributes:
        named_tokens: bos_token, eos_token and so on, as text; templates use them.
    """

    def __init__(self, folder: Path) -> None:
        # One text at a time has nothing to share out, and the library would start a thread per core for it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError(f"{folder}: there is no tokenizer.json; kLLM needs the model's fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelFilesError(f"{path}: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.named_tokens = _named_tokens(config, read_json(folder / "special_tokens_map.json"))
        self._add_tokens(config)
        self._restore_bos(config)
        self._adds_special_tokens = len(self.encode("")) > 0
        self._pieces = PieceCache([] if self._is_random else list(self._tokenizer.get_added_tokens_decoder().values()))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if there is one."""
        token = self.named_tokens.get("bos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id that the tokenizer knows."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds to every text."""
        return self._encode(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered template, which has its special tokens already; see `PieceCache`."""
        return self._pieces.ids(text, self._encode_pieces)

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that follows other tokens."""
        ids = self.encode(text)
        return ids[1:] if ids and ids[0] == self.bos_token_id else ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(ids))

    @property
    def _is_random(self) -> bool:
        """Whether equal texts may get different ids, as in training."""
        return bool(getattr(self._tokenizer.model, "dropout", None))

    def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=not self._adds_special_tokens)
        return [list(each.ids) for each in encoded]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call releases the interpreter lock, the single one does not; `fast` leaves offsets out.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded[0].ids)

    def _add_tokens(self, config: Mapping[str, Any]) -> None:
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        decoder = config.get("added_tokens_decoder")
        listed = [entry for _, entry in sorted(decoder.items(), key=lambda item: int(item[0]))] if decoder else []
        named = [{"content": token, "special": True} for token in self.named_tokens.values()]
        for entry in [*listed, *named]:
            content = entry.get("content")
            if isinstance(content, str) and content not in known:
                flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "special") if k in entry}
                self._tokenizer.add_tokens([AddedToken(content, normalized=bool(entry.get("normalized")), **flags)])
                known[content] = self._tokenizer.token_to_id(content)

    def _restore_bos(self, config: Mapping[str, Any]) -> None:
        """Give the classes that had a flag for it in earlier releases their BOS back, as the engine does."""
        if config.get("tokenizer_class") not in _CLASSES_WITH_BOS_FLAG:
            return
        flag = config.get("add_bos_token")
        bos, bos_id = self.named_tokens.get("bos_token"), self.bos_token_id
        if (True if flag is None else bool(flag)) and bos is not None and bos_id is not None:
            self._tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A:0"], pair=[bos, "$A:0", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
            )


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, those that only this model has included; the first source that has one wins."""
    tokens: dict[str, str] = {}
    own = sorted({name for source in sources for name in source if name.endswith("_token")} - set(_NAMED_TOKENS))
    for name in (*_NAMED_TOKENS, *own):
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
                break
    return tokens
