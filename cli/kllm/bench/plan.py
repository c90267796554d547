"""What is sent and when, known before the first request. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kllm.bench.lengths import Lengths
from kllm.bench.trace import Recorded


@dataclass(frozen=True)
class Planned:
    """One request.

    Attributes:
        index: its place in the plan, which its prompt depends on.
        at: seconds from the beginning.
        blocks: ids of the prompt's blocks of 512 tokens; without, the prompt is like no other.
        key: of the client that sends it; the simulator's router is fair between them.
    """

    index: int
    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    key: str = ""


def generators(seed: int) -> tuple[np.random.Generator, np.random.Generator, np.random.Generator]:
    """Independent ones for arrivals, input and output lengths, so that changing one leaves the others as they were."""
    first, second, third = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    return first, second, third


def plan_of_arrivals(times: Sequence[float], *, inputs: Lengths, outputs: Lengths, seed: int) -> list[Planned]:
    """Requests at these times, with lengths drawn."""
    _, for_inputs, for_outputs = generators(seed)
    lengths = zip(inputs.draw(len(times), for_inputs), outputs.draw(len(times), for_outputs), strict=True)
    return [
        Planned(index, at, *tokens) for index, (at, tokens) in enumerate(zip(times, lengths, strict=True))
    ]  # fmt: skip


def plan_of_trace(
    recorded: Sequence[Recorded],
    *,
    speed: float = 1.0,
    duration: float = math.inf,
    inputs: Lengths | None = None,
    outputs: Lengths | None = None,
    seed: int = 0,
) -> list[Planned]:
    """The requests of a trace.

    Args:
        recorded: sorted, beginning at 0.
        speed: 2 sends them in half of the time.
        duration: what would be sent at this time or later is left out.
        inputs: drawn in place of the trace's own lengths, which its blocks belong to.
        outputs: the same for answers.
        seed: of what is drawn.
    """
    _, for_inputs, for_outputs = generators(seed)
    kept = [request for request in recorded if request.at / speed < duration]
    input_tokens = [request.input_tokens for request in kept] if inputs is None else inputs.draw(len(kept), for_inputs)
    output_tokens = (
        [request.output_tokens for request in kept] if outputs is None else outputs.draw(len(kept), for_outputs)
    )
    return [
        Planned(index, request.at / speed, isl, osl, request.blocks if inputs is None else ())
        for index, (request, isl, osl) in enumerate(zip(kept, input_tokens, output_tokens, strict=True))
    ]
