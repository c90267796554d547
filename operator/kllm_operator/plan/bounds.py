"""Counts that others ask for, within what the service allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.plan.members import Limits


def bounded(asked: Mapping[Role, int], limits: Limits, *, there: Mapping[Role, int]) -> DesiredCounts:
    """The nearest counts within limits and budget; the reason is ScalingLimited where they differ from what was asked.

    A budget that does not hold all goes to what is there first, and then, one by one, to the role with the smaller
    part of what it asks for: nothing that serves is taken away for what others ask.

    Args:
        asked: counts by role; where nobody is known to ask for any, what is there stays.
        limits: of the service.
        there: instances that serve or will, by role.
    """
    least = {role: limits.of(role).min_replicas for role in Role}
    wanted = {role: limits.of(role).clamp(asked.get(role, there.get(role, 0))) for role in Role}
    counts = {role: max(least[role], min(wanted[role], there.get(role, 0))) for role in Role}
    while not _fits(counts, limits):
        giver = max(Role, key=lambda role: (counts[role] - least[role], limits.of(role).gpus))
        counts[giver] -= 1
    while able := [role for role in Role if counts[role] < wanted[role] and _fits_one_more(counts, role, limits)]:
        counts[min(able, key=lambda role: counts[role] / wanted[role])] += 1
    limited = [
        _says(role, asked[role], counts[role], limits) for role in Role if asked.get(role, counts[role]) != counts[role]
    ]
    if limited:
        return DesiredCounts(counts[Role.PREFILL], counts[Role.DECODE], "ScalingLimited", "; ".join(limited))
    says = "as asked for from outside" if asked else "nobody asks for counts, so they stay"
    return DesiredCounts(counts[Role.PREFILL], counts[Role.DECODE], "External", says)


def _fits(counts: Mapping[Role, int], limits: Limits) -> bool:
    return limits.fits(limits.gpus(counts[Role.PREFILL], counts[Role.DECODE]))


def _fits_one_more(counts: Mapping[Role, int], role: Role, limits: Limits) -> bool:
    return _fits({**counts, role: counts[role] + 1}, limits)


def _says(role: Role, asked: int, count: int, limits: Limits) -> str:
    pool = limits.of(role)
    if asked < pool.min_replicas:
        why = f"minReplicas is {pool.min_replicas}"
    elif count == pool.max_replicas:
        why = f"maxReplicas is {pool.max_replicas}"
    else:
        why = f"gpuBudget is {limits.gpu_budget}"
    return f"{role} is asked for {asked} and gets {count}: {why}"
