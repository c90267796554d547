"""SGLang's KV events as they come over ZMQ: tagged msgpack maps inside an array [time, [events], dp rank]."""

from __future__ import annotations

import msgspec

_TokenId = int | tuple[int, int]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Blocks that entered a tier, in the order of their prefix.

    Attributes:
        block_hashes: SGLang's hashes, signed 64 bits.
        parent_block_hash: hash of the block before the first one; None at the start of a prompt.
        token_ids: ids of all blocks, one after the other; pairs when the engine keys its cache by bigrams.
        block_size: tokens per block.
    """

    block_hashes: list[int]
    token_ids: list[_TokenId]
    block_size: int
    parent_block_hash: int | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    cache_salt: str | None = None

    def plain_token_ids(self) -> list[int]:
        """Token ids; of a bigram its first half, which is the token at that place."""
        return [token if isinstance(token, int) else token[0] for token in self.token_ids]


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """Blocks that left a tier."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The whole cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    time: float
    events: list[KvEvent]
    dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """Events of one published batch.

    Raises:
        msgspec.DecodeError: the payload is not a batch of KV events.
    """
    return _decoder.decode(payload).events
