"""When an engine has no room, and whose fault that is. Pure."""

from __future__ import annotations

from kllm_core.fleet import EngineLoad


def blocked(load: EngineLoad) -> bool:
    """Whether a prefill instance computes nothing new because parked KV is at its limit: decode's fault."""
    parked, limit = load.parked_tokens, load.parked_limit_tokens
    return parked is not None and limit is not None and parked >= max(1, limit)


def full(load: EngineLoad) -> bool:
    """Whether a decode instance has no room for one more request."""
    over = load.kv_used_tokens is not None and load.kv_high_water_tokens is not None
    if over and (load.kv_used_tokens or 0) >= (load.kv_high_water_tokens or 0):
        return True
    running, most = load.running_requests, load.max_running_requests
    return running is not None and most is not None and running >= most
