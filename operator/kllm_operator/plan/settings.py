"""Settings of load and planner: each with its unit, default and reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadSettings:
    """How load is judged."""

    prefill_share: float = 0.7
    """Part of the TTFT objective for queue and prefill, 0.7; the rest is for the way to decode and its first step.
    Prefill is by far the longest stage. Too high: slow transfers break the objective while no load shows it."""
    most_prefill_share: float = 0.9
    """What it may be where the way to decode is measured and takes less than the rest, 0.9: the next prompt that is on
    that way may be a longer one."""
    stale_after_seconds: float = 10.0
    """Seconds after which an engine's load or a measurement is unknown, 10: two ticks of the control loop, ten
    reports of an engine. Too low: a hiccup blinds the planner. Too high: it acts on what is gone."""
    least_samples: int = 5
    """Requests below which a percentile is ignored, 5. Too low: one slow request starts an instance."""
    chunk_tokens: int = 8192
    """Tokens of one prefill step, 8192: SGLang's chunked-prefill default on large GPUs."""
    saturation: float = 0.95
    """Utilisation above which a queue is taken to grow for the whole horizon, 0.95. Closer to 1 steady-state formulas
    explode, and small errors of the timing model decide."""
    horizon_seconds: float = 60.0
    """Seconds that an overload is left to grow, and a queue has to be worked off, in the forecast, 60: the time that a
    start takes. Too low: every short queue starts an instance. Too high: queues last."""
    unreachable_slack: float = 1.25
    """Factor over what unlimited instances would reach, 1.25; an objective below that floor counts as met there.
    Without it an objective that no count can meet would take every GPU."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill_share < 1:
            raise ValueError(f"prefill_share must be between 0 and 1, got {self.prefill_share}")
        if not self.prefill_share <= self.most_prefill_share < 1:
            raise ValueError(
                f"most_prefill_share must be at least prefill_share {self.prefill_share} and below 1, "
                f"got {self.most_prefill_share}"
            )
        if not 0 < self.saturation < 1:
            raise ValueError(f"saturation must be between 0 and 1, got {self.saturation}")
        if self.unreachable_slack <= 1:
            raise ValueError(f"unreachable_slack must be above 1, got {self.unreachable_slack}")


@dataclass(frozen=True)
class OutlookSettings:
    """How far ahead demand is looked at, and how much of what may come is provided for."""

    forecast_quantile: float = 0.8
    """Probability with which demand stays under what is provided for, 0.8: what it exceeds it by is mostly little, and
    queues take that. Higher buys head-room with GPU time, the more the longer starts take."""
    keep_quantile: float = 0.99
    """The same for what is left when instances are given up, 0.99: what chance takes away, it soon asks for again.
    Lower follows falling demand sooner, and starts more often."""
    lead_margin_seconds: float = 5.0
    """Seconds beyond a start and a tick that are looked ahead, 5: some starts take longer than the last ones did, and
    what arrives is told with a second's delay."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.forecast_quantile < 1:
            raise ValueError(f"forecast_quantile must be at least 0.5 and below 1, got {self.forecast_quantile}")
        if not 0.5 <= self.keep_quantile < 1:
            raise ValueError(f"keep_quantile must be at least 0.5 and below 1, got {self.keep_quantile}")
        if not self.lead_margin_seconds >= 0:
            raise ValueError(f"lead_margin_seconds must not be negative, got {self.lead_margin_seconds}")


@dataclass(frozen=True)
class PlannerSettings:
    """When counts change. Loads are over their limits here: 1.0 is the boundary."""

    scale_up_above: float = 1.0
    """Load above which instances are added, 1.0: the boundary of the objective. Lower buys head-room with GPU time."""
    aim_below: float = 1.0
    """Load that an added count must reach, 1.0: what may come beyond the forecast is in its quantile. Lower adds more
    at a time, and takes back what was too much."""
    scale_down_below: float = 0.8
    """Load that the remaining instances must stay under, 0.8. Close to `scale_up_above` counts oscillate; far below it
    instances stay for nothing."""
    spare: float = 0.15
    """Part by which demand may exceed the forecast before the remaining instances would be too few, 0.15. A load says
    little of how far its boundary is: a queue is short until just before it is endless. Too low: counts oscillate."""
    growth_starts: float = 0.0
    """Time for which more must have been needed before they are added, in lengths of a start, 0: at once. A load that
    swings but is flat in the mean takes some percent less with 0.3; one that rises is met later."""
    urgent_above: float = 5.0
    """Load above which more are added at once in any case, 5.0."""
    stabilisation_starts: float = 1.0
    """Time for which fewer must have been enough before they are, in lengths of a start, 1.0: an instance that is kept
    for as long as its return would take costs at most twice what the best choice would have, whatever comes."""
    stabilisation_seconds: float = 30.0
    """The same in seconds, whichever is more, 30: six ticks. Too short: counts follow what is chance, and each change
    has work for people who want to know why."""
    cancel_seconds: float = 15.0
    """The same for an instance that does not serve yet, 15: three ticks. Giving it up costs a later start at most."""
    rebalance_seconds: float = 30.0
    """The same when the other pool is short and can use the GPUs, 30: six ticks. Too short: a burst of long prompts
    moves instances there and back."""
    zero_after_seconds: float = 600.0
    """Seconds without a request after which a service whose minReplicas are 0 has no instance any more, 600. Shorter
    saves GPU time; each first request after it waits for a start."""
    growth_factor: float = 2.0
    """Most that a pool grows in one decision, 2.0 times, and always by up to two; it shrinks by no more. One bad
    forecast would otherwise take the whole budget; a true one is followed in a few ticks."""
    growth_seconds: float = 5.0
    """Seconds in which it grows by that and no more, 5: a tick. Decisions follow one another at once where something
    changes, and what they know does not."""

    measured_step: int = 1
    """Instances that a measured overload adds where the prediction sees none, 1, each time that all before it serve.
    More overshoots after a peak; 1 follows slowly while the timing model is wrong, until it is fitted."""

    def __post_init__(self) -> None:
        if not 0 < self.scale_down_below < self.aim_below <= self.scale_up_above:
            raise ValueError(
                "scale_down_below < aim_below <= scale_up_above must hold, "
                f"got {self.scale_down_below}, {self.aim_below}, {self.scale_up_above}"
            )
        if not self.growth_starts >= 0:
            raise ValueError(f"growth_starts must not be negative, got {self.growth_starts}")
        if self.measured_step < 1:
            raise ValueError(f"measured_step must be at least 1, got {self.measured_step}")
        if self.growth_factor < 1:
            raise ValueError(f"growth_factor must be at least 1, got {self.growth_factor}")
        if self.spare < 0:
            raise ValueError(f"spare must not be negative, got {self.spare}")
