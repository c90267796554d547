"""What simulations found, as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kllm.sim.outcome import Outcome, Percentiles
from kllm_core.objectives import Objectives

_MOST_REASONS = 8


def text_of(outcome: Outcome, *, title: str, objectives: Objectives) -> str:
    """One simulation, for people."""
    requests = outcome.requests
    ended = "; interrupted, so all of this is of its first part" if outcome.is_interrupted else ""
    others = {
        "rejected": requests.rejected, "failed": requests.failed, "unfinished": requests.unfinished,
        "moved": requests.moved, "retracted": requests.retracted,
    }  # fmt: skip
    lines = [
        f"{title}, {outcome.policy}: {requests.arrived} requests in {outcome.simulated_seconds:.0f} s{ended}",
        "  ".join([f"finished {requests.finished}", *(f"{name} {count}" for name, count in others.items() if count)]),
        f"attainment {_share(outcome.attainment.both)} of all that arrived: "
        f"{_share(outcome.attainment.ttft)} met TTFT <= {objectives.ttft_seconds * 1000:g} ms, "
        f"{_share(outcome.attainment.tpot)} TPOT <= {objectives.tpot_seconds * 1000:g} ms",
        "",
        *_latencies(outcome),
        "",
        f"GPU time {outcome.gpu_seconds / 3600:.3f} h, at most {outcome.peak} GPUs; mean instances: {_means(outcome)}",
        f"starts {outcome.starts}  cancelled {outcome.cancelled}  flips {outcome.flips}  failures {outcome.failures}",
        *_reasons(outcome),
        f"simulated in {outcome.speed.wall_seconds:.1f} s, {outcome.speed.cpu_seconds:.1f} s of a processor: "
        f"{outcome.speed.output_tokens_per_second:,.0f} output tokens per second of that",
    ]
    return "\n".join(lines)


def table_of(outcomes: Iterable[Outcome]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Several simulations: titles and rows, in their order."""
    titles = (
        "policy", "attained", "TTFT", "TPOT", "GPU h", "mean instances", "peak", "starts", "flips",
        "TTFT p50 s", "p99 s", "TPOT p50 ms", "p99 ms",
    )  # fmt: skip
    return titles, [_row(each) for each in outcomes]


def _row(outcome: Outcome) -> tuple[str, ...]:
    attainment, ttft, tpot = outcome.attainment, outcome.ttft, outcome.tpot
    return (
        f"{outcome.policy}{' (interrupted)' if outcome.is_interrupted else ''}",
        *(_share(share) for share in (attainment.both, attainment.ttft, attainment.tpot)),
        f"{outcome.gpu_seconds / 3600:.3f}", _means(outcome), str(outcome.peak), str(outcome.starts),
        str(outcome.flips), _number(ttft.p50), _number(ttft.p99), _number(tpot.p50, 1000), _number(tpot.p99, 1000),
    )  # fmt: skip


def _latencies(outcome: Outcome) -> list[str]:
    names = ("mean", "p50", "p90", "p95", "p99")
    stages = [(name, values) for name, values in outcome.stages.items() if values.mean is not None]
    rows: Sequence[tuple[str, Percentiles]] = [("TTFT", outcome.ttft), ("TPOT", outcome.tpot), *stages]
    head = f"{'ms':<9}" + "".join(f"{name:>11}" for name in names)
    return [head, *(f"{name:<9}" + "".join(_cell(getattr(each, column)) for column in names) for name, each in rows)]


def _reasons(outcome: Outcome) -> list[str]:
    if not outcome.decisions:
        return []
    counted = Counter(decision.reason for decision in outcome.decisions).most_common(_MOST_REASONS)
    return ["decisions " + "  ".join(f"{reason} {count}" for reason, count in counted)]


def _means(outcome: Outcome) -> str:
    return " + ".join(f"{count:.2f} {pool}" for pool, count in outcome.mean_replicas.items())


def _share(share: float) -> str:
    return f"{share:.1%}"


def _cell(seconds: float | None) -> str:
    return f"{'-':>11}" if seconds is None else f"{seconds * 1000:>11.1f}"


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.2f}"
