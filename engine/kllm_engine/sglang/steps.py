"""Cuts what SGLang tells of one request into steps after which another engine could go on. Pure.

A content is what SGLang's TokenizerManager yields: text and ids so far, and `meta_info`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from kllm_engine.sglang.pieces import Cleanness, Pieces

Content = dict[str, Any]


class Steps(Protocol):
    """Contents of one request, in order."""

    def of(self, content: Content) -> Iterator[Content]:
        """What the stream's handler shall see; nothing while the text ends in the middle of a character."""
        ...

    def taken(self) -> list[int]:
        """Ids since the last call, all of them in contents that were given."""
        ...


def finish_of(content: Content) -> dict[str, Any] | None:
    """Why the request ended; None while it runs."""
    finish: dict[str, Any] | None = content["meta_info"].get("finish_reason")
    return finish


class PlainSteps:
    """For handlers that pass text on as it comes.

    Args:
        cleanness: follows the output.
        seen: ids at the beginning that were told before.
    """

    def __init__(self, cleanness: Cleanness, *, seen: int = 0) -> None:
        self._cleanness = cleanness
        self._seen = seen
        self._open: list[int] = []
        self._ids: list[int] = []

    def of(self, content: Content) -> Iterator[Content]:
        """The content itself."""
        new = content["output_ids"][self._seen :]
        self._seen += len(new)
        self._open += new
        if self._cleanness.after(new) or finish_of(content) is not None:
            self._ids += self._open
            self._open.clear()
            yield content

    def taken(self) -> list[int]:
        """Ids since the last call."""
        ids, self._ids = self._ids, []
        return ids


class ParsedSteps:
    """For handlers whose parser hears each token alone: its answers depend on how its input is cut.

    Args:
        pieces: text of the tokens; those that were told before are in it.
        seen: how many those are.
        length: characters of their text.
    """

    def __init__(self, pieces: Pieces, *, seen: int = 0, length: int = 0) -> None:
        self._pieces = pieces
        self._seen = seen
        self._length = length
        self._open: list[int] = []
        self._ids: list[int] = []

    def of(self, content: Content) -> Iterator[Content]:
        """One content for each token, or for the tokens of one character."""
        ids = list(content["output_ids"])
        ended = finish_of(content) is not None
        first, self._seen = self._seen, len(ids)
        for count in range(first + 1, len(ids) + 1):
            self._open.append(ids[count - 1])
            piece = self._pieces.add(ids[count - 1])
            if piece is None:
                continue
            self._ids += self._open
            self._open.clear()
            self._length += len(piece)
            # A stop string takes text back: what goes beyond the answer belongs to its last step.
            if not ended or (count < len(ids) and self._length <= len(content["text"])):
                yield _cut(content, ids[:count], self._length)
        if ended:
            yield content

    def taken(self) -> list[int]:
        """Ids since the last call."""
        ids, self._ids = self._ids, []
        return ids


def _cut(content: Content, ids: list[int], length: int) -> Content:
    later = len(content["output_ids"]) - len(ids)
    meta = content["meta_info"]
    counts = {
        name: meta[name] - later for name in ("completion_tokens", "output_token_logprobs_length") if name in meta
    }
    return {
        **content,
        "text": content["text"][:length],
        "output_ids": ids,
        "meta_info": {**meta, **counts, "finish_reason": None},
    }
