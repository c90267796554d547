"""Token ids of a long text from those of its pieces, so that a conversation's next turn costs its new text only.

A tokenizer first looks for its special tokens in a text as it stands, and what lies between two of them is tokenised by
itself. A text that is cut right before a special token therefore has the ids of both parts, one after the other. That
does not hold for special tokens which take spaces from what precedes them or look at it; those are no cuts, and with
one that looks at words there are none at all. A rendered chat has such a token before each message.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

MAX_CACHE_BYTES = 64 << 20
_LEAST_CHARACTERS = 256
"""Shorter pieces are tokenised faster than they are found."""
_ENTRY_BYTES = 300
"""Of one cached piece beside its ids."""
_DIGEST_BYTES = 20

Encode = Callable[[list[str]], list[list[int]]]
"""Ids of each of some texts."""


class PieceCache:
    """Ids by piece, the least recently used forgotten first. Safe to use from several threads.

    Clients share it: what one sees of another's texts is that they were tokenised sooner, as with the engines' prefix
    caches. Pieces are told apart by a cryptographic digest, so that nobody can make one pass for another.

    Args:
        added: the tokenizer's added tokens; see `cuts`.
        max_bytes: about what it may hold.
    """

    def __init__(self, added: Sequence[Any], *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._pattern, self._cuts = cuts(added)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """About what it holds."""
        return self._bytes

    def ids(self, text: str, encode: Encode) -> list[int]:
        """Ids of a text to which the tokenizer adds no special tokens."""
        pieces = self._pieces(text)
        if len(pieces) == 1 and len(text) < _LEAST_CHARACTERS:
            return encode(pieces)[0]
        digests = [_digest(piece) if len(piece) >= _LEAST_CHARACTERS else None for piece in pieces]
        found = self._found(digests)
        missing = [place for place, ids in enumerate(found) if ids is None]
        for place, new in zip(missing, encode([pieces[place] for place in missing]), strict=True):
            found[place] = array("I", new)
        self._keep([(digests[place], found[place]) for place in missing])
        whole = array("I")
        for ids in found:
            whole.extend(ids or ())
        return whole.tolist()

    def _pieces(self, text: str) -> list[str]:
        if self._pattern is None:
            return [text]
        begins = [each.start() for each in self._pattern.finditer(text) if each.group() in self._cuts]
        edges = [0, *(begin for begin in begins if begin), len(text)]
        return [text[begin:end] for begin, end in itertools.pairwise(edges)]

    def _found(self, digests: Sequence[bytes | None]) -> list[array[int] | None]:
        with self._lock:
            found = [None if digest is None else self._ids.get(digest) for digest in digests]
            for digest, ids in zip(digests, found, strict=True):
                if digest is not None and ids is not None:
                    self._ids.move_to_end(digest)
            return found

    def _keep(self, new: Sequence[tuple[bytes | None, array[int] | None]]) -> None:
        with self._lock:
            for digest, ids in new:
                if digest is None or ids is None or digest in self._ids:
                    continue
                self._ids[digest] = ids
                self._bytes += _size(ids)
            while self._bytes > self._max_bytes and self._ids:
                _, ids = self._ids.popitem(last=False)
                self._bytes -= _size(ids)


def cuts(added: Sequence[Any]) -> tuple[re.Pattern[str] | None, frozenset[str]]:
    """What finds all special tokens of a text, as the tokenizer does, and those before which it may be cut.

    Args:
        added: `AddedToken`s. Those that are looked for in the normalised text come later and cannot cross a cut.
    """
    raw = [token for token in added if not token.normalized and token.content]
    if not raw or any(token.single_word for token in raw):
        return None, frozenset()
    # Of two that begin at one place the longer one is found.
    texts = sorted((token.content for token in raw), key=len, reverse=True)
    usable = frozenset(t.content for t in raw if not t.lstrip and not t.content[0].isspace())
    return re.compile("|".join(map(re.escape, texts))), usable


def _digest(piece: str) -> bytes:
    return hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _size(ids: array[int]) -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)
