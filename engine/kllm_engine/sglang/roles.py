"""Which instances can switch between prefill and decode, as far as their arguments tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping

Value = bool | int | float | str | None

_ONE_ROLE_ONLY = {
    "enable-dp-attention": "DP attention",
    "data-parallel-size": "data parallelism",
    "expert-parallel-size": "expert parallelism",
    "pipeline-parallel-size": "pipeline parallelism",
    "dp-size": "data parallelism",
    "ep-size": "expert parallelism",
    "pp-size": "pipeline parallelism",
    "attn-cp-size": "context parallelism of prefill instances",
    "decode-context-parallel-size": "decode context parallelism",
    "dcp-size": "decode context parallelism",
    "moe-a2a-backend": "all-to-all between experts",
    "speculative-algorithm": "speculative decoding",
    "speculative-draft-model-path": "speculative decoding",
    "disaggregation-decode-host-receive-threshold": "receiving KV into host memory",
    "disaggregation-decode-enable-offload-kvcache": "KV offload of decode instances",
    "enable-hisparse": "HiSparse",
    "enable-hierarchical-cache": "a hierarchical cache",
    "enable-lmcache": "LMCache",
}
"""What SGLang sets up for one role and does not set up again."""

_OFF: tuple[Value, ...] = (None, False, 0, 1, "none")


def flip_obstacle(given: Mapping[str, Value]) -> str:
    """Why an instance with these SGLang arguments cannot switch roles; empty when it can."""
    for name, words in _ONE_ROLE_ONLY.items():
        # 1 is a size that means none, and true is not: the two are equal in Python.
        if name in given and (given[name] is True or given[name] not in _OFF):
            return f"{words} ({name} in engineArgs) excludes it"
    if given.get("disaggregation-decode-enable-radix-cache", True) is not True and not given.get("disable-radix-cache"):
        return "it needs disaggregation-decode-enable-radix-cache, which engineArgs turn off"
    return ""
