"""The engine's cache as the fleet sees it: block hashes by tier. Pure.

SGLang's hashes mean nothing outside the engine; each is mapped to the chain of `kllm_core.blocks`, which a router
computes from token ids alone.
"""

from __future__ import annotations

from kllm_core.blocks import extend_chain, root_hash
from kllm_engine.agent.cache.changes import Change, Cleared, Removed, Stored, Tier
from kllm_engine.agent.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class UnknownParentError(Exception):
    """Blocks continue a prefix that this mirror has never seen, so their chain cannot be computed."""


class CacheMirror:
    """Blocks of one engine.

    Args:
        page_size: tokens per block. Blocks of another size cannot be matched by a router and are left out.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._chains: dict[int, int] = {}
        self._held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        # Two engine hashes can share a chain: the engine's key may hold more than adapter and salt.
        self._owners: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}

    def apply(self, event: KvEvent) -> Change | None:
        """Follow one event.

        Returns:
            What it changed for the fleet, or None.

        Raises:
            UnknownParentError: the event continues an unknown prefix; nothing was changed.
            ValueError: the event contradicts itself; nothing was changed.
        """
        match event:
            case BlockStored():
                return self._store(event)
            case BlockRemoved():
                return self._remove(event)
            case AllBlocksCleared():
                return self.clear()

    def clear(self) -> Cleared:
        """Forget all blocks."""
        self._chains.clear()
        for tier in Tier:
            self._held[tier].clear()
            self._owners[tier].clear()
        return Cleared()

    def blocks(self, tier: Tier) -> tuple[int, ...]:
        """Block hashes in one tier."""
        return tuple(self._owners[tier])

    def __len__(self) -> int:
        return sum(len(owners) for owners in self._owners.values())

    def _store(self, event: BlockStored) -> Stored | None:
        tier = _tier(event.medium)
        if event.block_size != self._page_size or tier is None:
            return None
        if len(event.token_ids) != event.block_size * len(event.block_hashes):
            raise ValueError(
                f"{len(event.block_hashes)} blocks of {event.block_size} tokens came with {len(event.token_ids)} tokens"
            )
        hashes = extend_chain(self._parent_chain(event), event.plain_token_ids(), self._page_size)
        new: list[int] = []
        held, owners = self._held[tier], self._owners[tier]
        for engine_hash, block in zip(event.block_hashes, hashes, strict=True):
            if engine_hash in held:
                continue
            held.add(engine_hash)
            self._chains[engine_hash] = block
            owners[block] = owners.get(block, 0) + 1
            if owners[block] == 1:
                new.append(block)
        return Stored(tier, tuple(new)) if new else None

    def _parent_chain(self, event: BlockStored) -> int:
        if event.parent_block_hash is None:
            adapter = "" if event.lora_id is None else str(event.lora_id)
            return root_hash(adapter=adapter, salt=event.cache_salt or "")
        try:
            return self._chains[event.parent_block_hash]
        except KeyError:
            raise UnknownParentError(f"parent block {event.parent_block_hash}") from None

    def _remove(self, event: BlockRemoved) -> Removed | None:
        tier = _tier(event.medium)
        if tier is None:
            return None
        gone: list[int] = []
        held, owners = self._held[tier], self._owners[tier]
        for engine_hash in event.block_hashes:
            if engine_hash not in held:
                continue
            held.discard(engine_hash)
            block = self._chains[engine_hash]
            owners[block] -= 1
            if owners[block] == 0:
                del owners[block]
                gone.append(block)
            if not any(engine_hash in other for other in self._held.values()):
                del self._chains[engine_hash]
        return Removed(tier, tuple(gone)) if gone else None


def _tier(medium: str | None) -> Tier | None:
    if medium is None:
        return Tier.DEVICE
    try:
        return Tier(medium)
    except ValueError:
        return None
