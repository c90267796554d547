"""The engines' own policy of prefill steps, on modelled engines."""

from __future__ import annotations

from collections.abc import Sequence

from kllm_core.engine_model.job import Job, Phase
from kllm_core.engine_model.spec import EngineSpec
from kllm_engine.policy.fair_prefill import FairPrefill, Prompt


class FairTurns:
    """Which prompts enter a step of one engine.

    Args:
        spec: of the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._policy = FairPrefill.of_pool(spec.kv_tokens, chunk_tokens=spec.chunk_tokens)
        self._keys: dict[Job, str] = {}
        self._given = 0

    def __call__(self, jobs: Sequence[Job], tokens: int) -> list[tuple[Job, int]]:
        """Those that enter, with their most new tokens, of all that wait in the order of their arrival."""
        known = {self._key(job): job for job in jobs}
        self._keys = {job: key for key, job in known.items()}
        prompts = [_prompt(key, job) for key, job in known.items()]
        turn = self._policy.turn(prompts, tokens=tokens)
        entering = [(known[key], tokens) for key in turn.whole]
        return entering if turn.part is None else [*entering, (known[turn.part], turn.part_tokens)]

    def _key(self, job: Job) -> str:
        if job not in self._keys:
            self._given += 1
            return str(self._given)
        return self._keys[job]


def _prompt(key: str, job: Job) -> Prompt:
    begun = job.phase is Phase.PREFILL
    rest = job.prompt_tokens - (job.computed if begun else job.expected_cached)
    return Prompt(key, job.prompt_tokens, max(1, rest), begun)
