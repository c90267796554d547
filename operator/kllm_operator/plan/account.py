"""Accounts for a decision: its reason, and what it was weighed against. Pure."""

from __future__ import annotations

from kllm_core.objectives import Role
from kllm_operator.plan.burst import burst_of
from kllm_operator.plan.decision import Decision
from kllm_operator.plan.why import Alternative, RoleWhy, Why


def why_of(decision: Decision) -> Why:
    """What a decision was weighed against."""
    roles = tuple(_role_why(decision, role) for role in Role if decision.limits.of(role).max_replicas > 0)
    counts = decision.counts[Role.PREFILL], decision.counts[Role.DECODE]
    burst = burst_of(
        decision.model, decision.before.past, now=decision.now, lead_seconds=decision.lead_seconds,
        start_seconds=decision.start_seconds, above=decision.settings.scale_up_above,
    )  # fmt: skip
    return Why(decision.model.outlook, roles, decision.limits.cost(*counts), _alternatives(decision), burst)


def reason_of(decision: Decision, why: Why) -> str:
    """The reason, in CamelCase."""
    base, counts, limits = decision.base, decision.counts, decision.limits
    more = any(counts[role] > base[role] for role in Role)
    fewer = any(counts[role] < base[role] for role in Role)
    short = [role for role in Role if counts[role] < decision.needs[role]]
    at_most = all(counts[role] >= limits.of(role).max_replicas for role in short)
    strains = [decision.at(role, base[role]).strain for role in Role]
    strained = any(strain is not None and strain > decision.settings.scale_up_above for strain in strains)
    awaits = strained or any(decision.awaited(role) for role in Role)
    reasons = {
        "ScaledToZero": decision.sleeps and fewer,
        "Rebalanced": decision.rebalanced,
        "MaxReplicasReached": bool(short) and at_most,
        "BudgetExhausted": bool(short),
        "ScaledFromZero": any(decision.before.count(role) == 0 and counts[role] for role in Role),
        "ScaledUp": more,
        "ScaledDown": fewer,
        "DemandOutranStarts": why.burst is not None and awaits,
        "AwaitingCapacity": strained,
        "LoadUnknown": None in strains,
    }
    return next((reason for reason, holds in reasons.items() if holds), "Steady")


def _role_why(decision: Decision, role: Role) -> RoleWhy:
    before, after = decision.base[role], decision.counts[role]
    counts = {max(1, each) for each in (before - 1, before, before + 1, after - 1, after, after + 1)}
    held = decision.held(role)
    return RoleWhy(
        role,
        before,
        after,
        decision.needs[role],
        tuple(decision.at(role, count) for count in sorted(counts)),
        held if held >= 0 else None,
        decision.patience(role),
    )


def _alternatives(decision: Decision) -> tuple[Alternative, ...]:
    found = []
    for role in Role:
        for change in (-1, 1):
            counts = {**decision.counts, role: decision.counts[role] + change}
            pair = counts[Role.PREFILL], counts[Role.DECODE]
            limits = decision.limits
            if limits.fits(limits.gpus(*pair)) and limits.of(role).clamp(counts[role]) == counts[role]:
                loads = decision.at(Role.PREFILL, pair[0]).load.value, decision.at(Role.DECODE, pair[1]).load.value
                found.append(Alternative(*pair, limits.cost(*pair), loads))
    return tuple(found)
