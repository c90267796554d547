"""KV page allocation in PyTorch, where SGLang launches Triton kernels that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Launchable:
    """A function that is called as a Triton kernel is: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._function


def allocate_extend(
    prefix_lengths: torch.Tensor,
    lengths: torch.Tensor,
    last_locations: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _grid_width: int,
    page_size: int,
) -> None:
    """Locations of each request's new tokens, one request after another: the rest of its last page, then new pages.

    Where the free pages do not suffice, the rest of `out` stays as it is; the caller counts pages and discards it.
    """
    written = taken = 0
    requests = zip(prefix_lengths.tolist(), lengths.tolist(), last_locations.tolist(), strict=True)
    for prefix, length, last in requests:
        head = min(length, -(-prefix // page_size) * page_size) - prefix
        out[written : written + head] = torch.arange(last + 1, last + 1 + head, dtype=out.dtype)
        rest = length - prefix - head
        pages = free_pages[taken : taken + -(-rest // page_size)]
        slots = (pages[:, None] * page_size + torch.arange(page_size, dtype=pages.dtype)).reshape(-1)[:rest]
        if len(slots) < rest:
            return
        out[written + head : written + head + rest] = slots
        written += head + rest
        taken += len(pages)


def allocate_decode(
    lengths: torch.Tensor,
    last_locations: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _grid_width: int,
    page_size: int,
) -> None:
    """Location of each request's next token: after its last one, or at the start of a new page."""
    out.copy_(last_locations + 1)
    starts = torch.nonzero((lengths - 1) % page_size == 0).reshape(-1)
    # Where the free pages do not suffice, the caller counts pages and discards `out`.
    starts = starts[: len(free_pages)]
    out[starts] = free_pages[: len(starts)] * page_size


def install(paged_module: Any) -> None:
    """Put both in the place of the kernels that SGLang's paged allocator calls."""
    paged_module.alloc_extend_kernel = Launchable(allocate_extend)
    paged_module.alloc_decode_kernel = Launchable(allocate_decode)
