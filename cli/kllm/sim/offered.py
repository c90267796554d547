"""The requests that a simulation is given: a part of a trace, or steps of constant rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kllm.bench.arrivals import Arrivals, arrivals
from kllm.bench.exceptions import OptionError
from kllm.bench.lengths import Lengths
from kllm.bench.plan import Planned, generators, plan_of_arrivals, plan_of_trace
from kllm.bench.trace import Recorded, TraceError, read_trace

MAX_REQUESTS = 1_000_000
_MOST_RATE = 1_000_000.0
_MOST_SECONDS = 31 * 86_400.0
_PAUSE_SECONDS = 600.0
"""A pause in a trace that is as long as this is told: it may be a hole in the recording."""


@dataclass(frozen=True)
class Step:
    """A constant rate.

    Attributes:
        rate: requests per second; 0 is a pause.
        seconds: how long it lasts.
    """

    rate: float
    seconds: float


@dataclass(frozen=True)
class Offered:
    """What is offered to the service.

    Attributes:
        requests: sorted by time.
        seconds: from the beginning to the end of the load; answers may take longer.
        name: for titles.
        notes: what a reader of the results should know.
    """

    requests: tuple[Planned, ...]
    seconds: float
    name: str
    notes: tuple[str, ...] = ()

    def too_long(self, kv_tokens: int) -> str | None:
        """A note on requests that no engine with so large a KV pool can hold; None without any."""
        lengths = [each.input_tokens + each.output_tokens for each in self.requests]
        misfits = sum(length > kv_tokens for length in lengths)
        if not misfits:
            return None
        return (
            f"{misfits} of {len(lengths)} requests do not fit into the engines' {kv_tokens} tokens of KV and will be "
            f"rejected; the longest has {max(lengths)}"
        )


@dataclass(frozen=True)
class Part:
    """Which part of a trace is replayed, and how.

    Attributes:
        begin: seconds of the trace.
        end: seconds of the trace, not included.
        limit: most requests that are read; None reads all.
        speed: 2 replays it in half of the time.
        scale: 2 offers twice as many requests in the same time, 0.5 every other one.
    """

    begin: float = 0.0
    end: float = math.inf
    limit: int | None = None
    speed: float = 1.0
    scale: float = 1.0


def parse_ramp(text: str) -> tuple[Step, ...]:
    """Read `2:330,4:360`: requests per second and seconds of each step.

    Raises:
        OptionError: a step is something else.
    """
    steps = []
    for number, part in enumerate(text.split(","), start=1):
        rate_text, colon, seconds_text = part.partition(":")
        try:
            rate, seconds = float(rate_text), float(seconds_text)
        except ValueError:
            rate, seconds = math.nan, math.nan
        if not colon or not (0 <= rate <= _MOST_RATE and 0 < seconds <= _MOST_SECONDS):
            raise OptionError(
                "--ramp", f"step {number}, {part.strip()!r}, must be RATE:SECONDS, requests per second from 0 and "
                f"seconds above 0 (at most {_MOST_SECONDS:.0f})"
            )  # fmt: skip
        steps.append(Step(rate, seconds))
    if not any(step.rate > 0 for step in steps):
        raise OptionError("--ramp", "no step has a rate above 0, so no request arrives")
    if sum(step.rate * step.seconds for step in steps) > MAX_REQUESTS:
        raise OptionError("--ramp", f"these are more than {MAX_REQUESTS} requests; make it shorter")
    return tuple(steps)


def parse_window(text: str) -> tuple[float, float]:
    """Read `600:1800`, `600:` or `:1800`, in seconds.

    Raises:
        OptionError: it is something else.
    """
    begin_text, colon, end_text = text.strip().partition(":")
    try:
        begin, end = float(begin_text or 0), float(end_text or math.inf)
    except ValueError:
        begin, end = math.nan, math.nan
    if not colon or not 0 <= begin < end:
        raise OptionError("--window", f"{text!r} must be BEGIN:END in seconds of the trace, such as 600:1800 or 600:")
    return begin, end


def of_ramp(steps: Sequence[Step], *, kind: Arrivals, inputs: Lengths, outputs: Lengths, seed: int) -> Offered:
    """Requests of each step in turn.

    Raises:
        OptionError: chance has it that none arrives.
    """
    rng, _, _ = generators(seed)
    times: list[float] = []
    begin = 0.0
    for step in steps:
        if step.rate > 0:
            times += [begin + at for at in arrivals(kind, rate=step.rate, duration=step.seconds, rng=rng)]
        begin += step.seconds
    if not times:
        raise OptionError("--ramp", "no request arrives in so short a time; make it longer")
    name = "ramp of " + ", ".join(f"{step.rate:g}" for step in steps) + " requests/s"
    return Offered(tuple(plan_of_arrivals(times, inputs=inputs, outputs=outputs, seed=seed)), begin, name)


def of_trace(path: Path, part: Part, *, inputs: Lengths | None, outputs: Lengths | None, seed: int) -> Offered:
    """Requests of a part of a trace, whose times then begin at 0.

    Args:
        path: of the file.
        part: what of it, and how.
        inputs: drawn in place of the trace's own lengths, which its blocks belong to.
        outputs: the same for answers.
        seed: of what is drawn.

    Raises:
        OptionError: the file is no trace, its times run backwards, or the part holds no request.
    """
    try:
        recorded = read_trace(path, limit=part.limit, ordered=True)
    except TraceError as error:
        raise OptionError("--trace", str(error)) from error
    last = recorded[-1].at
    kept = [replace(each, at=each.at - part.begin) for each in recorded if part.begin <= each.at < part.end]
    if not kept:
        raise OptionError("--window", f"no request of {path} is in it: the last one comes at {last:.0f} s")
    # The load of a part ends where the part does; that of a whole trace with its last request.
    seconds = (min(part.end, last) if part.end < math.inf else last) - part.begin
    if (lasts := seconds / part.speed) > _MOST_SECONDS:
        raise OptionError(
            "--window",
            f"this part of {path} lasts {lasts:.3g} s, and at most {_MOST_SECONDS:.0f} are simulated: "
            f"line {kept[-1].line} comes at {kept[-1].at + part.begin:.3g} s; cut it, or raise --speed",
        )
    notes = tuple(_pauses(kept, begin=part.begin))
    scaled = kept if part.scale == 1 else _scaled(kept, part.scale, np.random.default_rng([seed, 3]))
    if not scaled:
        raise OptionError("--scale-rate", f"{part.scale:g} leaves no request; raise it")
    if len(scaled) > MAX_REQUESTS:
        raise OptionError("--scale-rate", f"these are more than {MAX_REQUESTS} requests; lower it, or cut --window")
    requests = plan_of_trace(scaled, speed=part.speed, inputs=inputs, outputs=outputs, seed=seed)
    return Offered(tuple(requests), seconds / part.speed, _name(path, part), notes)


def _scaled(recorded: Sequence[Recorded], scale: float, rng: np.random.Generator) -> list[Recorded]:
    """As many times the requests, each a moment later than the one it is a copy of, and the rest left out by chance.

    A copy's prompt begins like those of other copies of the same round only, so that the share that caches can spare
    stays what it is.
    """
    whole, part = divmod(scale, 1.0)
    counts = int(whole) + (rng.random(len(recorded)) < part)
    blocks = 1 + max((block for each in recorded for block in each.blocks), default=0)
    following = [each.at for each in recorded[1:]] + [recorded[-1].at]
    result = []
    for each, count, until in zip(recorded, counts.tolist(), following, strict=True):
        later = np.sort(rng.uniform(0.0, max(0.0, until - each.at), size=max(0, count - 1))).tolist()
        for copy, delay in enumerate([0.0, *later][:count]):
            own = tuple(block + copy * blocks for block in each.blocks)
            result.append(replace(each, at=each.at + delay, blocks=own))
    return result


def _pauses(recorded: Sequence[Recorded], *, begin: float) -> Iterable[str]:
    for before, after in itertools.pairwise(recorded):
        if after.at - before.at >= _PAUSE_SECONDS:
            yield (
                f"line {after.line}: nothing arrives for {after.at - before.at:.0f} s before it "
                f"(from {begin + before.at:.0f} s of the trace); the pause is simulated as it stands"
            )


def _name(path: Path, part: Part) -> str:
    window = "" if part.begin == 0 and part.end == math.inf else f" {part.begin:g}:{part.end:g} s"
    speed = "" if part.speed == 1 else f", {part.speed:g} times as fast"
    scale = "" if part.scale == 1 else f", {part.scale:g} times the rate"
    return f"{path.name}{window}{speed}{scale}".replace(":inf s", ": s")
