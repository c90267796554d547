"""What distinguishes one engine from another. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from kllm_core.timing import EngineTiming


class Duty(enum.StrEnum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    """It computes prompts and parks their KV until a decode engine has taken it."""
    DECODE = "decode"
    """It takes over KV and generates."""
    BOTH = "both"
    """Whole requests."""


@dataclass(frozen=True)
class EngineSpec:
    """One type of engine. Tokens, seconds, requests.

    Attributes:
        timing: of its steps.
        kv_tokens: that its KV pool holds.
        chunk_tokens: most new tokens of one prefill step; longer prompts take several.
        max_running: most requests that decode together, or that hold KV on a prefill engine.
        high_water: share of the KV pool above which a decode engine says that it wants nothing new.
        parked_share: share of the KV pool that may be parked before a prefill engine computes nothing new.
        reserve_tokens: room that must be left per running request when a further one is admitted to decode.
        accept_length: output tokens per sequence and decode step, mean; above 1 with speculative decoding.
        mixed: an engine for whole requests computes prompts and decodes in one step; otherwise prompts go first.
        block_tokens: per block of the prefix cache.
        host_tokens: KV that a second tier in host memory keeps of what the first has evicted; 0: there is none.
        host_load_seconds: to load one token from there.
        flippable: it can switch between prefill and decode when it is empty.
    """

    timing: EngineTiming
    kv_tokens: int = 500_000
    chunk_tokens: int = 8192
    max_running: int = 256
    high_water: float = 0.9
    parked_share: float = 0.5
    reserve_tokens: int = 512
    accept_length: float = 1.0
    mixed: bool = False
    block_tokens: int = 512
    host_tokens: int = 0
    host_load_seconds: float = 0.0
    flippable: bool = False

    def __post_init__(self) -> None:
        if self.timing.decode.a <= 0 or self.timing.prefill.a + self.timing.prefill.b <= 0:
            raise ValueError("timing: a step must take time, so decode.a and prefill.a or prefill.b must be above 0")
        for name in ("kv_tokens", "chunk_tokens", "max_running", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("reserve_tokens", "host_tokens", "host_load_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("high_water", "parked_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if not 1 <= self.accept_length < math.inf:
            raise ValueError(f"accept_length must be at least 1, got {self.accept_length}")

    @property
    def parked_limit_tokens(self) -> int:
        """Parked KV at which a prefill engine computes nothing new."""
        return max(1, int(self.kv_tokens * self.parked_share))

    @property
    def high_water_tokens(self) -> int:
        """KV in use above which a decode engine wants nothing new."""
        return max(1, int(self.kv_tokens * self.high_water))
