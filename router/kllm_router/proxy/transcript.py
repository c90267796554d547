"""What the client of a stream has been told, as far as another instance must know it to go on."""

from __future__ import annotations

import re
from typing import Any

import orjson

_IDS = b": kllm-ids "
_LATER_IDS = b"\n: kllm-ids "
_FINISH = b'"finish_reason":'
_WORDS = b'"{'
"""What a reason begins with; there is null before the end."""
# An engine that aborts by itself, because it is being stopped, ends a stream as if it had been asked to.
_ABORTS = (b'"finish_reason":"abort"', b'"finish_reason":{"type":"abort"')
_CREATED = re.compile(rb'"created":\d+')
DONE = b"data: [DONE]\n\n"


class Transcript:
    """Token ids as engines announce them, and whether the end was told. Shared by all attempts of one stream.

    Attributes:
        finished: the client has been told why its stream ends; at most usage and the end are missing.
        aborted: an engine has ended the stream without having been asked to.

    Args:
        kept_bytes: bound on the written ids.
    """

    def __init__(self, kept_bytes: int) -> None:
        self.finished = False
        self.aborted = False
        self._left = kept_bytes
        self._ids: list[bytes] = []
        self._unannounced = False
        self._last = b""

    @property
    def resumable(self) -> bool:
        """Whether the ids so far stand for all of the text so far."""
        return not self._unannounced and self._left >= 0

    @property
    def tokens(self) -> int:
        """How many ids there are so far."""
        return sum(part.count(b",") + 1 for part in self._ids)

    @property
    def ids(self) -> list[int]:
        """All ids so far."""
        return [int(number) for part in self._ids for number in part.split(b",") if number]

    def take(self, events: bytes) -> bytes:
        """Note whole events that the client will get; give them without the ids, and without an abort."""
        if _LATER_IDS not in events:
            return self._take_part(events)
        first, *later = events.split(_LATER_IDS)  # parts that were read together
        parts = [first, *(_IDS + part for part in later)]
        return b"".join([self._take_part(part + b"\n") for part in parts[:-1]] + [self._take_part(parts[-1])])

    def ending(self, *, prompt_tokens: int, path: str, include_usage: bool) -> bytes:
        """The events that a finished stream still lacks."""
        if not include_usage or path == "/generate":
            return DONE
        event = next((line for line in reversed(self._last.split(b"\n\n")) if line.startswith(b"data: {")), b"data: {}")
        told: dict[str, Any] = orjson.loads(event[6:])
        completion = len(self.ids)
        told["choices"] = []
        told["usage"] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion,
            "completion_tokens": completion,
        }
        return b"data: " + orjson.dumps(told) + b"\n\n" + DONE

    def created(self) -> bytes | None:
        """The moment that the client's events carry, as they write it."""
        found = _CREATED.search(self._last)
        return found.group() if found else None

    # --- inside

    def _take_part(self, events: bytes) -> bytes:
        """Events with one announcement before them, or none. Runs for every part of every stream."""
        at = events.rfind(_FINISH)
        finishes = at >= 0 and events[at + len(_FINISH)] in _WORDS
        if finishes and events.startswith(_ABORTS, at):
            self.aborted = True
            return b""
        if events.startswith(_IDS):
            end = events.find(b"\n\n")
            ids = events[len(_IDS) : end]
            events = events[end + 2 :]
            self._unannounced = False
            if ids:
                self._left -= len(ids) + 1
                if self._left >= 0:
                    self._ids.append(ids)
        elif not self.finished:
            # Text without its ids: going on from the ids before it would repeat it.
            self._unannounced = True
        if finishes:
            self.finished = True
        if events:
            self._last = events
        return events


class Rewriting:
    """Makes events of another attempt look like those of the first one.

    Args:
        rid: of this attempt.
        shown: id that the client knows.
        created: as written in the events before; None leaves it.
    """

    def __init__(self, rid: str, shown: str, created: bytes | None = None) -> None:
        self._rid = rid.encode()
        self._shown = shown.encode()
        self._created = created

    def __call__(self, events: bytes) -> bytes:
        """The events as the client gets them."""
        events = events.replace(self._rid, self._shown)
        return events if self._created is None else _CREATED.sub(self._created, events)
