"""SGLang's prefix cache (0.5.21), told of each chunk of a long prompt at the cost of the chunk, not of the prompt.

After each chunk SGLang copies all ids and KV indices of the prompt so far, inserts them from the root, matches them
from the root, and moves the request's lock over the whole path, so that a prompt costs the square of its length. Here
the second and later chunks are inserted below the node that the request already holds: it is locked, so that it is not
evicted, and a split leaves its lower half under the same id, so that what lies above it keeps its length. The tree is
SGLang's own Python core, which differs in nothing but where an insert can begin.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.base_prefix_cache import IncLockRefResult, InsertParams, InsertResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, _InsertPhase, _InsertWalkState

BACKEND = "kllm"
_POSITION_ATTRIBUTE = "kllm_tree_position"
_INDICES_ATTRIBUTE = "kllm_kv_indices"


class IncrementalTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """SGLang's tree, of which an insert can begin below a node."""

    _below: tuple[int, int] | None = None

    def begin_below(self, node_id: int, length: int) -> None:
        """Let the next insert begin below a locked node.

        Args:
            node_id: the node.
            length: tokens from the root to its end; the insert's key holds what comes after them.
        """
        self._below = node_id, length

    def begin_insert(self, params: InsertParams) -> Any:
        """Start the insert."""
        below, self._below = self._below, None
        if below is None:
            return super().begin_insert(params)
        if self.has_ongoing_insert():
            raise RuntimeError("concurrent insert walks")
        node_id, length = below
        self._ongoing_insert_walk_state = _InsertWalkState(
            phase=_InsertPhase.WALK,
            node=self.node_by_id(node_id),
            key=params.key,
            value=params.value,
            params=params,
            priority=params.priority or 0,
            result=InsertResult(prefix_len=0),
            total_prefix_length=length,
        )
        return self._advance_insert()

    def move_lock(self, old_id: int, new_id: int) -> IncLockRefResult:
        """Move a request's lock from a node down to a later one of its path.

        What lies above it is not touched, as SGLang's match would: it can be evicted only after the later node, which
        is the latest used of the path, so that the order of eviction is the same.

        Returns:
            The receipt of the later node's lock.
        """
        node, old = self.node_by_id(new_id), self.node_by_id(old_id)
        last = node
        while node is not old:
            data = node.component_data[BASE_COMPONENT_TYPE]
            if data.lock_ref == 0:
                self.component_evictable_size_[BASE_COMPONENT_TYPE] -= len(data.value)
                self.component_protected_size_[BASE_COMPONENT_TYPE] += len(data.value)
            data.lock_ref += 1
            self.evictable_device_leaves.discard(node)
            node = node.parent
        self._update_evictable_leaf_sets(last)
        return IncLockRefResult(node_id=new_id)


class FillIds:
    """The first ids of a prompt without a copy of them.

    Args:
        ids: all of them.
        end: how many.
    """

    def __init__(self, ids: array[int], end: int) -> None:
        self._ids, self._end = ids, min(end, len(ids))

    def __len__(self) -> int:
        return self._end

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._end)
            return self._ids[start:stop:step]
        return self._ids[range(self._end)[index]]


def register() -> None:
    """Make it the tree of servers that begin in this process."""
    if BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(BACKEND, IncrementalTreeCore)
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = BACKEND


def cache_unfinished(
    original: Callable[..., None], tree: Any, request: Any, chunked: bool = False, **named: Any
) -> None:
    """A chunk of a prompt was computed."""
    if not chunked or not isinstance(tree.tree_core, IncrementalTreeCore) or not _plain(tree, request):
        original(tree, request, chunked=chunked, **named)
        return
    start = request.kv.cache_protected_len
    page = tree.page_size
    grown = (request.extend_range.end - start) // page * page
    if getattr(request, _POSITION_ATTRIBUTE, None) != (request.last_node, start) or grown <= 0:
        original(tree, request, chunked=chunked, **named)
        if not tree.tree_core.is_root(request.last_node):
            setattr(request, _POSITION_ATTRIBUTE, (request.last_node, request.kv.cache_protected_len))
        return
    _append(tree, request, start, start + grown)


def _plain(tree: Any, request: Any) -> bool:
    """Whether a prompt is nothing but tokens, each with KV of one kind that lasts."""
    core = tree.tree_core
    only_full = core.component_types == (BASE_COMPONENT_TYPE,)
    special = core.is_eagle or request.kv_rotation_base is not None or request.session is not None or tree.disable
    return only_full and not special and request.session_id is None


def _append(tree: Any, request: Any, start: int, end: int) -> None:
    row = request.kv.req_pool_idx
    pool, core, before = tree.req_to_token_pool, tree.tree_core, request.last_node
    ids = request.full_untruncated_fill_ids[start:end]
    params = InsertParams(
        key=RadixKey(ids, request.extra_key, cache_salt=request.cache_salt),
        value=pool.req_to_token[row, start:end].to(dtype=torch.int64, copy=True),
        prev_prefix_len=start,
        chunked=True,
        priority=request.priority or 0,
    )
    core.begin_below(before, start)
    after = tree.insert(params).last_device_node
    # Where another request was faster, its KV takes the place of this one's, which the insert has freed.
    indices = core.collect_full_device_indices(after, before)
    pool.write((row, slice(start, end)), indices)
    receipt = core.move_lock(before, after)
    request.prefix_indices = _indices(request, pool, start, end, indices)
    request.kv.cache_protected_len = end
    request.last_node = after
    request.lock_receipt = receipt.to_dec_params()
    request.swa_prefix_lock_released = False
    setattr(request, _POSITION_ATTRIBUTE, (after, end))


def _indices(request: Any, pool: Any, start: int, end: int, fresh: torch.Tensor) -> torch.Tensor:
    """KV indices of all that is computed: a view of one tensor that grows in place."""
    computed = request.extend_range.end
    buffer: torch.Tensor | None = getattr(request, _INDICES_ATTRIBUTE, None)
    if buffer is None or buffer.shape[0] < computed:
        size = max(computed, len(request.full_untruncated_fill_ids))
        buffer = torch.empty(size, dtype=torch.int64, device=fresh.device)
        buffer[:start] = request.prefix_indices[:start]
        setattr(request, _INDICES_ATTRIBUTE, buffer)
    elif request.prefix_indices.data_ptr() != buffer.data_ptr():
        buffer[:start] = request.prefix_indices[:start]
    buffer[start:end] = fresh
    if computed > end:
        buffer[end:computed] = pool.req_to_token[request.kv.req_pool_idx, end:computed]
    return buffer[:computed]


def fill_ids(original: Callable[[Any], Any], request: Any) -> Any:
    """Ids up to the end of the present chunk."""
    if getattr(request, _POSITION_ATTRIBUTE, None) is None:
        return original(request)
    return FillIds(request.full_untruncated_fill_ids, request.extend_range.end)


TABLE: tuple[tuple[str, Callable[..., Any], Literal["AROUND"]], ...] = (
    (
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_unfinished_req",
        cache_unfinished,
        "AROUND",
    ),
    ("sglang.srt.managers.schedule_batch.Req.get_fill_ids", fill_ids, "AROUND"),
)
"""Target, function, kind."""
