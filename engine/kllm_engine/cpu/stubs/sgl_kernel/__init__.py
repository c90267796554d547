"""Stands in for SGLang's CUDA kernel package on machines without a GPU; put on sys.path only there.

It registers no torch operators, so that every SGLang layer takes its pure PyTorch path. It must not define
`scalar_type`: SGLang takes its presence for a sign of quantisation kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.7"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, *_: Any
) -> None:
    """Write each request's new cache locations, which lie one after another, into its row of the token table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any other kernel: importable, but an error where it is called."""
    if name.startswith("__") or name == "scalar_type":
        raise AttributeError(name)

    def missing(*_arguments: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this machine has none")

    missing.__name__ = name
    return missing
