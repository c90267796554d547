"""Jobs whose KV an engine holds although no step of it is for them, and those in its prefill. Pure."""

from __future__ import annotations

from kllm_core.engine_model.job import Job, Phase


class Holding:
    """Jobs by phase.

    Attributes:
        prefilling: their prompts are computed.
        parked: their KV waits for a decode engine.
        moving: their KV is on its way, from here or to here.
        parked_tokens: of those that are parked.
    """

    def __init__(self) -> None:
        self.prefilling: set[Job] = set()
        self.parked: set[Job] = set()
        self.moving: set[Job] = set()
        self.parked_tokens = 0

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.parked) + len(self.moving)

    def park(self, job: Job) -> None:
        """Its KV waits, for the first time or again."""
        self.drop(job)
        job.phase = Phase.PARKED
        self.parked.add(job)
        self.parked_tokens += job.prompt_tokens

    def move(self, job: Job, phase: Phase) -> None:
        """Its KV is on its way."""
        self.drop(job)
        job.phase = phase
        self.moving.add(job)

    def drop(self, job: Job) -> None:
        """It is none of those."""
        if job in self.parked:
            self.parked.remove(job)
            self.parked_tokens -= job.prompt_tokens
        self.prefilling.discard(job)
        self.moving.discard(job)
