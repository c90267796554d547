"""One request on one engine. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Phase(enum.Enum):
    """Where a job is on its engine."""

    WAITING = enum.auto()
    """For prefill, or for room on decode."""
    PREFILL = enum.auto()
    PARKED = enum.auto()
    """Its KV waits on prefill for a decode engine."""
    LEAVING = enum.auto()
    """A decode engine takes its KV."""
    ARRIVING = enum.auto()
    """It has room on decode, and its KV is on its way."""
    READY = enum.auto()
    """It joins the next decode step."""
    RUNNING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class Job:
    """One request on one engine. Times are seconds on the caller's clock.

    Attributes:
        tag: of the caller.
        prompt_tokens: whose KV is needed before it generates.
        output_tokens: that are left to generate, at least 1.
        blocks: ids of the prompt's full blocks, each of which stands for all before it, too; none: nothing is shared.
        brought: output tokens that come with its KV: prefill computes the first one, which shows once it joins decode.
        cached_tokens: of the prompt that a prefix cache spared, once prefill has begun.
        began_at: when its prefill began.
        prefilled_at: when that was done.
        generated: output tokens that are finished.
    """

    tag: object
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    brought: int = 0
    phase: Phase = Phase.WAITING
    cached_tokens: int = 0
    expected_cached: int = 0
    computed: int = 0
    pinned: int = 0
    private_tokens: int = 0
    began_at: float | None = None
    prefilled_at: float | None = None
    generated: int = 0
    joined_step: int = 0
    end_step: int = field(default=0)

    @property
    def kv_tokens(self) -> int:
        """KV that it needs when it joins decode: the prompt and what it has generated."""
        return self.prompt_tokens + self.generated

    @property
    def left(self) -> int:
        """Output tokens that it has still to generate."""
        return self.output_tokens - self.generated


class Kind(enum.Enum):
    """What has happened to a job."""

    PREFILLED = enum.auto()
    """Its prompt is computed; an engine for whole requests has its first token, too."""
    ADMITTED = enum.auto()
    """A decode engine has room for it: its KV may come."""
    FIRST = enum.auto()
    """Its first token here shows: as it joins if that came with its KV, else when its first step ends, at `at`, which
    is ahead."""
    RETRACTED = enum.auto()
    """The KV pool was full, and it lost its place; it waits again."""
    FINISHED = enum.auto()


class Happening(NamedTuple):
    """Something that happened to a job, and when."""

    kind: Kind
    job: Job
    at: float
