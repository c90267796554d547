"""What a benchmark found: a summary of its rows, as a document and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kllm.bench.attainment import Goals, attainment
from kllm.bench.row import Row, Status

PERCENTILES = (50, 90, 95, 99)
_LATE_SECONDS = 0.02
_LENGTH_TOLERANCE = 0.1


@dataclass(frozen=True)
class Summary:
    """Figures of one run.

    Attributes:
        planned: requests of the whole plan.
        requests: those whose time came; by status in the four numbers that follow.
        errors: how many failed, by kind.
        elapsed_seconds: from the beginning of the load to its last answer.
        ttft_ms: of answered requests: mean, p50, p90, p95, p99, max; empty without any. Likewise tpot_ms and e2e_ms.
        lag_ms: how late the client itself sent.
        goodput_per_second: requests per second that met both objectives; None without objectives, like those below.
        met: requests that met both objectives.
        attainment: their share of all requests whose time came.
        wrong_lengths: answers with another number of tokens than asked for.
        prompt_tokens_per_asked: how long prompts were, over how long they should have been.
    """

    planned: int
    requests: int
    ok: int
    failed: int
    rejected: int
    unfinished: int
    errors: dict[str, int]
    is_interrupted: bool
    elapsed_seconds: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    lag_ms: dict[str, float]
    requests_per_second: float
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    goodput_per_second: float | None
    met: int | None
    attainment: float | None
    wrong_lengths: int
    prompt_tokens_per_asked: float | None

    def document(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarize(rows: Sequence[Row], *, planned: int, elapsed: float, goals: Goals, is_interrupted: bool) -> Summary:
    """Summarize a run of `elapsed` seconds."""
    good = [row for row in rows if row.status is Status.OK]
    by_status = Counter(row.status for row in rows)
    errors = Counter(row.error or "unknown" for row in rows if row.status is Status.FAILED)
    seconds = max(elapsed, 1e-9)
    counted = [row for row in good if row.prompt_tokens is not None]
    asked = sum(row.input_tokens for row in counted)
    prompt_tokens = sum(row.prompt_tokens or 0 for row in counted)
    met = sum(map(goals.meets, rows)) if goals.are_set else None
    return Summary(
        planned=planned,
        requests=len(rows),
        ok=by_status[Status.OK],
        failed=by_status[Status.FAILED],
        rejected=by_status[Status.REJECTED],
        unfinished=by_status[Status.UNFINISHED],
        errors=dict(sorted(errors.items())),
        is_interrupted=is_interrupted,
        elapsed_seconds=round(elapsed, 3),
        ttft_ms=figures(row.ttft for row in good),
        tpot_ms=figures(row.tpot for row in good),
        e2e_ms=figures(row.e2e for row in good),
        lag_ms=figures(row.lag for row in rows),
        requests_per_second=round(len(good) / seconds, 3),
        prompt_tokens_per_second=round(prompt_tokens / seconds, 1),
        completion_tokens_per_second=round(sum(row.completion_tokens or 0 for row in good) / seconds, 1),
        goodput_per_second=None if met is None else round(met / seconds, 3),
        met=met,
        attainment=attainment(rows, goals),
        wrong_lengths=sum(row.completion_tokens != row.output_tokens for row in good),
        prompt_tokens_per_asked=round(prompt_tokens / asked, 3) if asked else None,
    )


def figures(seconds: Iterable[float | None]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds of those that are known."""
    known = np.array([value for value in seconds if value is not None], dtype=np.float64) * 1000
    if not known.size:
        return {}
    percentiles = np.percentile(known, PERCENTILES)
    named = {f"p{which}": value for which, value in zip(PERCENTILES, percentiles, strict=True)}
    return {
        name: round(float(value), 3) for name, value in {"mean": known.mean(), **named, "max": known.max()}.items()
    }  # fmt: skip


def text_of(summary: Summary, *, title: str, goals: Goals) -> str:
    """For people."""
    ended = ", interrupted" if summary.is_interrupted else ""
    lines = [
        f"{title}: {summary.requests} of {summary.planned} requests in {summary.elapsed_seconds:.1f} s{ended}",
        f"ok {summary.ok}  failed {summary.failed}  rejected {summary.rejected}  unfinished {summary.unfinished}",
    ]
    if summary.errors:
        lines.append("errors: " + "  ".join(f"{kind} {count}" for kind, count in summary.errors.items()))
    if summary.ok:
        lines += ["", *_table(summary), "", *_rates(summary)]
    if summary.attainment is not None:
        lines.append(
            f"attainment {summary.attainment:.1%}: {summary.met} of {summary.requests} met {goals} "
            f"({summary.goodput_per_second:.2f}/s)"
        )
    return "\n".join([*lines, *_warnings(summary)])


def _table(summary: Summary) -> list[str]:
    names = ("mean", *(f"p{which}" for which in PERCENTILES), "max")
    rows = [("ms", *names)]
    for title, values in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms), ("E2E", summary.e2e_ms)):
        rows.append((title, *(f"{values[name]:.1f}" if values else "-" for name in names)))
    return ["".join([f"{first:<4}", *(f"{cell:>11}" for cell in rest)]) for first, *rest in rows]


def _rates(summary: Summary) -> list[str]:
    return [
        f"throughput {summary.requests_per_second:.2f} requests/s, {summary.prompt_tokens_per_second:.0f} prompt and "
        f"{summary.completion_tokens_per_second:.0f} completion tokens/s"
    ]


def _warnings(summary: Summary) -> list[str]:
    lines = []
    if summary.wrong_lengths:
        lines.append(f"note: {summary.wrong_lengths} answers had another length than asked for")
    ratio = summary.prompt_tokens_per_asked
    if ratio is not None and abs(ratio - 1) > _LENGTH_TOLERANCE:
        lines.append(f"note: prompts had {ratio:.2f} times the tokens asked for")
    lag = summary.lag_ms.get("p99", 0.0)
    if lag > _LATE_SECONDS * 1000:
        lines.append(f"note: this client sent late (p99 {lag:.0f} ms), so the load was not quite the one asked for")
    return lines
