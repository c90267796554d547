"""Argues a decision of the planner as a person would, from what was told of it. Pure.

What is told comes from JSON documents: `why` is that of `kllm_operator.loop.account`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_TERMS = {
    "QueueAndPrefill": "waiting for prefill and the prefill itself, over prefill's part of the TTFT objective",
    "Tpot": "the time per output token, over the TPOT objective",
    "Handover": "the way from prefill to decode and its first step, over decode's part of the TTFT objective",
    "KvHighWater": "KV in use, over the high water of the engines",
}
_REASONS = {
    "Steady": "nothing has to change",
    "ScaledUp": "demand ahead needs more",
    "ScaledDown": "fewer have been enough for long enough",
    "ScaledToZero": "nothing has arrived for long enough, and nothing may serve meanwhile",
    "ScaledFromZero": "something arrived while nothing served",
    "Rebalanced": "one role has too much of what the other needs",
    "BudgetExhausted": "more are needed than gpuBudget allows",
    "MaxReplicasReached": "more are needed than maxReplicas allows",
    "AwaitingCapacity": "what is missing was asked for and does not serve yet",
    "DemandOutranStarts": "demand grew faster than instances can start",
    "LoadUnknown": "a load is unknown, so nothing is taken away",
    "CountsNotWritten": "what was decided could not be written, so that what stands is carried out",
    "ScalingLimited": "what others ask for is not within the limits",
}


@dataclass(frozen=True)
class Account:
    """What is known of a decision; documents as they were told, None is unknown.

    Attributes:
        title: where and when.
        desired: counts by pool.
        serving, starting, draining, queued: what there was at that moment, by pool.
        advice: nobody carries it out.
        waits_for: why no further step is taken.
        paused: no step is taken.
    """

    title: str
    desired: Mapping[str, int]
    reason: str
    message: str
    serving: Mapping[str, int] = field(default_factory=dict)
    starting: Mapping[str, int] = field(default_factory=dict)
    draining: Mapping[str, int] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)
    why: Mapping[str, Any] | None = None
    advice: bool = False
    waits_for: str = ""
    paused: bool = False


def argued(account: Account) -> Iterator[str]:
    """Lines for people."""
    meaning = _REASONS.get(account.reason)
    verb = "the planner would have" if account.advice else "wanted are"
    yield f"{account.title}: {verb} {_counts(account.desired)} ({account.reason}{f': {meaning}' if meaning else ''})"
    if account.advice:
        yield "Someone else writes the counts; this is advice."
    if account.paused:
        yield "It is paused: no step is taken."
    yield from _there(account)
    if account.why is None:
        yield f"It said: {account.message}" if account.message else "It said nothing more."
    else:
        yield from _demand(account.why)
        yield "Loads: 1.00 is the boundary of the objective."
        for role, told in account.why["roles"].items():
            yield ""
            yield from _role(role, told)
        yield from _cost(account)
    if account.waits_for:
        yield ""
        yield f"It waits for this: {account.waits_for}"


def _there(account: Account) -> Iterator[str]:
    parts = [
        f"{word} {_counts(counts)}"
        for word, counts in (
            ("serving were", account.serving), ("on their way", account.starting), ("draining", account.draining),
            ("waiting requests", account.queued),
        )
        if any(counts.values()) or word == "serving were"
    ]  # fmt: skip
    if account.serving:
        yield f"At that moment: {'; '.join(parts)}."


def _demand(why: Mapping[str, Any]) -> Iterator[str]:
    ahead = why.get("outlook")
    if ahead is None:
        yield "Demand: nothing of it is known."
    else:
        most = max(ahead["high_requests_per_second"].values())
        yield (
            f"Demand: {ahead['requests_per_second']:.3g} requests/s arrive by now; when what is decided now serves, in "
            f"{ahead['seconds']:.0f} s, {ahead['expected_requests_per_second']:.3g} are expected and hardly more than "
            f"{most:.3g}{_lengths(ahead)}."
        )
    if why.get("burst"):
        yield f"Nobody could have followed: {why['burst']}"


def _lengths(ahead: Mapping[str, Any]) -> str:
    prompt, cached, output = (ahead.get(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
    if prompt is None or output is None:
        return ""
    spared = f", of which caches spare {cached:.0f}" if cached else ""
    return f", with prompts of {prompt:.0f} tokens{spared} and answers of {output:.0f}"


def _role(role: str, told: Mapping[str, Any]) -> Iterator[str]:
    before, after = told["before"], told["after"]
    forecasts = {each["count"]: each for each in told["forecasts"]}
    change = f"stays at {after}" if before == after else f"goes from {before} to {after}"
    present = forecasts.get(max(1, before))
    yield f"{role.capitalize()} {change}."
    if present is None or present["value"] is None:
        yield "  Its load is unknown, and the unknown takes nothing away."
        return
    deciding = f": {_TERMS.get(present['term'], present['term'])} ({present['source'].lower()})"
    yield f"  With {before} its load ahead is {_load(present)}{deciding}."
    if after != before and after in forecasts:
        yield f"  With {after} it is {_load(forecasts[after])}."
    yield from _neighbours(told, forecasts)


def _neighbours(told: Mapping[str, Any], forecasts: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    before, after = told["before"], told["after"]
    fewer, more = forecasts.get(after - 1), forecasts.get(after + 1)
    if fewer is not None and after - 1 != before and after > 1:
        held, patience = told["held_seconds"], told["patience_seconds"]
        if (fewer["strain"] or 0.0) > 1:
            verdict = "too much"
        elif held is None or after != before:
            verdict = f"one goes when there has been clear room for that for {patience:.0f} s"
        else:
            verdict = f"enough, and has been for {held:.0f} of the {patience:.0f} s that it must have been"
        yield f"  One fewer, {after - 1}, would leave {_load(fewer)}: {verdict}."
    if more is not None and after + 1 != before:
        short = told["needs"] > after
        verdict = f"{told['needs']} are needed, which bounds or budget do not allow" if short else "nothing asks for it"
        yield f"  One more, {after + 1}, would leave {_load(more)}: {verdict}."


def _cost(account: Account) -> Iterator[str]:
    why = account.why or {}
    cheaper = [each for each in why.get("alternatives", ()) if each["cost"] < why["cost"]]
    if cheaper:
        yield ""
        yield f"An hour of this costs {why['cost']:g}. What would cost less:"
        for each in cheaper:
            loads = ", ".join(f"{role} {_number(load)}" for role, load in each["loads"].items())
            yield f"  prefill {each['prefill']} and decode {each['decode']} for {each['cost']:g}, with loads {loads}"


def _load(told: Mapping[str, Any]) -> str:
    value = told["value"]
    limit = (told["terms"].get(told["term"]) or {}).get("limit")
    over = f" (its limit is {limit:.2f}, as no count comes much nearer to the objective)" if limit and limit > 1 else ""
    return f"{_number(value)}{over}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{pool} {count}" for pool, count in counts.items())
