"""Where the text of a token sequence may be cut: after a whole character, as SGLang's detokeniser sees it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 5
"""Prompt tokens that SGLang's detokeniser looks at before the first of the output."""

_REPLACEMENT = "\ufffd"
_UNKNOWN, _WHOLE, _PART = 0, 1, 2


class WholeTokens:
    """Remembers which tokens of a vocabulary are whole characters by themselves.

    Args:
        decode: text of token ids, special ones included.
        vocabulary: its size.
    """

    def __init__(self, decode: Decode, vocabulary: int) -> None:
        self._decode = decode
        self._known = bytearray(vocabulary)

    def __contains__(self, token: int) -> bool:
        if not 0 <= token < len(self._known):
            return False
        known = self._known[token]
        if known == _UNKNOWN:
            known = self._known[token] = _PART if _REPLACEMENT in self._decode([token]) else _WHOLE
        return known == _WHOLE


class Cleanness:
    """Tells whether a growing output ends between two characters.

    Args:
        whole: tokens that need no further look.
        decode: text of token ids, as the request wants it.
    """

    def __init__(self, whole: WholeTokens, decode: Decode) -> None:
        self._whole = whole
        self._decode = decode
        self._open: list[int] = []

    def after(self, tokens: Sequence[int]) -> bool:
        """Take the next tokens; True if all text so far ends with a whole character."""
        for token in tokens:
            if self._open or token not in self._whole:
                self._open.append(token)
                if not self._decode(self._open).endswith(_REPLACEMENT):
                    self._open.clear()
        return not self._open


class Pieces:
    """Gives the text that each token adds, by the same two windows as SGLang's detokeniser.

    Args:
        decode: text of token ids, as the request wants it.
        prompt: tokens before the first.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._told = list(prompt[-CONTEXT_TOKENS:])
        self._told_length = len(decode(self._told))
        self._new: list[int] = []

    def add(self, token: int) -> str | None:
        """Text that has become whole; None in the middle of a character."""
        self._new.append(token)
        text = self._decode(self._told + self._new)[self._told_length :]
        if text.endswith(_REPLACEMENT):
            return None
        if text:
            self._told, self._new = self._new, []
            self._told_length = len(self._decode(self._told))
        return text
