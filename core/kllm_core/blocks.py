"""Hashes of KV blocks: one number for a block and all that precedes it. Pure.

Router and agents compute the same chain from token ids, whatever the engine's own hashes are. Model adapter and cache
salt seed the chain, so that prefixes of different adapters or tenants never match.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

_HASH_BYTES = 8


def root_hash(*, adapter: str = "", salt: str = "") -> int:
    """Parent of a prompt's first block: 64 bits that stand for model adapter (LoRA) and cache salt."""
    # Lengths first, so that ("ab", "c") and ("a", "bc") differ.
    encoded = adapter.encode(), salt.encode()
    header = b"".join(len(part).to_bytes(4, "little") for part in encoded)
    return xxhash.xxh3_64_intdigest(header + b"".join(encoded))


def extend_chain(parent: int, token_ids: Sequence[int], page_size: int) -> list[int]:
    """Hash the full blocks of `token_ids`, which continue the prefix that `parent` stands for.

    Args:
        parent: hash of the block before, or `root_hash` at the start of a prompt.
        token_ids: ids in 0 … 2**32 - 1; a tail shorter than a page is left out.
        page_size: tokens per block, at least 1.

    Returns:
        One 64-bit hash per full block, in order: xxh3(parent ‖ ids as little-endian uint32).

    Raises:
        ValueError: page size below 1, or an id outside its range.
    """
    hashes: list[int] = _chain(parent, token_ids, page_size).tolist()
    return hashes


def block_hashes(token_ids: Sequence[int], page_size: int, *, adapter: str = "", salt: str = "") -> list[int]:
    """Hashes of all full blocks of a prompt, from its start. See `extend_chain`."""
    return extend_chain(root_hash(adapter=adapter, salt=salt), token_ids, page_size)


def block_hash_array(
    token_ids: Sequence[int], page_size: int, *, adapter: str = "", salt: str = ""
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The same as `block_hashes`, as an array."""
    return _chain(root_hash(adapter=adapter, salt=salt), token_ids, page_size)


def _chain(parent: int, token_ids: Sequence[int], page_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    full = len(token_ids) // page_size * page_size
    wide = np.asarray(token_ids[:full], dtype=np.int64)
    if full and (wide.min() < 0 or wide.max() > 0xFFFFFFFF):
        raise ValueError("token ids must be in 0 to 4294967295")
    data = wide.astype("<u4").tobytes()
    width = page_size * 4
    digest, before = xxhash.xxh3_64_digest, parent.to_bytes(_HASH_BYTES, "little")
    digests = []
    for start in range(0, full * 4, width):
        # A digest is big-endian, and a parent is hashed as a little-endian number.
        before = digest(before + data[start : start + width])[::-1]
        digests.append(before)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
