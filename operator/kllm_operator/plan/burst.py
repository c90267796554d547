"""Bursts that nothing that follows demand could have met. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kllm_core.fleet import Fleet
from kllm_core.objectives import Role
from kllm_operator.plan.demand import Demand, known
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.memory import Past

_ROSE = 1.5
"""Factor by which demand must have risen to be called a burst: below it other things made the load."""


@dataclass(frozen=True)
class Burst:
    """Demand rose faster than anything that follows it can start.

    Attributes:
        before: requests per second, at a time from which on a start would have been of use.
        rate: by now.
        seconds: between both.
        start_seconds: that a start takes.
    """

    before: float
    rate: float
    seconds: float
    start_seconds: float

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"demand rose from {self.before:.3g} to {self.rate:.3g} requests/s within {self.seconds:.0f} s, and a "
            f"start takes {self.start_seconds:.0f} s: whatever follows demand comes too late"
        )


def burst_of(
    model: LoadModel,
    past: tuple[Past, ...],
    *,
    now: float,
    lead_seconds: float,
    start_seconds: float,
    above: float,
) -> Burst | None:
    """Whether what serves is too little only for what came while nothing could have started.

    Args:
        model: what load follows from.
        past: rates in the order of their times.
        now: on the clock of `past`.
        lead_seconds: that a decision needs until it helps.
        start_seconds: the start in it.
        above: load from which on it is too little.
    """
    rate = known(model.demand.forecast.requests_per_second) if model.outlook is None else model.outlook.level
    old = [each for each in past if each.at <= now - lead_seconds]
    if rate is None or not old or rate < _ROSE * old[-1].requests_per_second:
        return None
    before = old[-1]
    forecast = replace(model.demand.forecast, requests_per_second=before.requests_per_second)
    for role in Role:
        served, strain = len(model.fleet.serving(role)), model.now(role).strain
        # By the rate alone, since queues and batches are those of the burst.
        bare = {each.id: replace(each, load=None) for each in model.fleet.of(role)}
        calm = replace(model, outlook=None, fleet=Fleet(model.fleet.taken_at, bare), demand=Demand(forecast))
        coped = calm.at(role, served).strain
        if served and strain is not None and strain > above and coped is not None and coped <= above:
            return Burst(before.requests_per_second, rate, now - before.at, start_seconds)
    return None
