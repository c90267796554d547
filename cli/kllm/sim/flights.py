"""One request on its way through the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kllm.bench.row import Status
from kllm_core.engine_model.job import Job

if TYPE_CHECKING:
    from kllm.sim.instances import Instance
    from kllm.sim.links import Transfer


@dataclass(slots=True, eq=False)
class Flight:
    """One request. Times are simulated seconds; None has not happened.

    Attributes:
        blocks: ids of the prompt's full blocks.
        prefill: where its prompt is, or its KV until decode has it; where all of it is with one pool.
        decode: where it generates, or is to.
        generated: tokens of earlier attempts, which are a part of the prompt.
        is_counted: it came when counting had begun.
        key: of the client that sent it.
        parked_at: its KV was complete, at first.
        prefill_seconds: that it was computed for.
        first_at: its first token; in the future while its first step goes on.
    """

    index: int
    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    is_counted: bool = True
    key: str = ""
    status: Status = Status.UNFINISHED
    error: str = ""
    prefill: Instance | None = None
    prompt: Job | None = None
    decode: Instance | None = None
    answer: Job | None = None
    transfer: Transfer | None = None
    attempts: int = 1
    generated: int = 0
    cached_tokens: int = 0
    parked_at: float | None = None
    prefill_seconds: float | None = None
    bound_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """That its next prefill has."""
        return self.input_tokens + self.generated

    @property
    def left(self) -> int:
        """Output tokens still to come."""
        return self.output_tokens - self.generated

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.at

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first, of one that is finished; None with fewer than two."""
        if self.status is not Status.OK or self.first_at is None or self.ended_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.output_tokens - 1)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the stages that are over, by the names that routers tell them by."""
        told: dict[str, float] = {}
        if self.parked_at is not None and self.prefill_seconds is not None:
            told["queue"] = max(0.0, self.parked_at - self.at - self.prefill_seconds)
            told["prefill"] = self.prefill_seconds
            if self.bound_at is not None:
                told["bind"] = max(0.0, self.bound_at - self.parked_at)
                if self.first_at is not None:
                    told["transfer"] = max(0.0, self.first_at - max(self.bound_at, self.parked_at))
        if self.ttft is not None:
            told["ttft"] = self.ttft
        if self.tpot is not None:
            told["tpot"] = self.tpot
        return told
