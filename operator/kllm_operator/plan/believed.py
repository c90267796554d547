"""What measurements say of the capacity that there is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Role
from kllm_operator.plan.demand import Demand, Measurement
from kllm_operator.plan.settings import LoadSettings


@dataclass(frozen=True)
class Believed:
    """Measurements of one moment, without those that are old news or chance. Seconds; None is unknown."""

    demand: Demand
    settings: LoadSettings

    def of(self, role: Role, measurement: Measurement | None) -> float | None:
        """One of them, of a stage that depends on the role's capacity."""
        if measurement is None:
            return None
        return measurement.believed(
            changed_age_seconds=self.demand.changed_age_seconds(role),
            stale_after_seconds=self.settings.stale_after_seconds,
            least_samples=self.settings.least_samples,
        )

    def whole(self, role: Role, together: Measurement | None, *parts: Measurement | None) -> float | None:
        """What was measured of the parts together; of parts alone their sum."""
        whole = self.of(role, together)
        return self.total(role, *parts) if whole is None else whole

    def total(self, role: Role, *measurements: Measurement | None) -> float | None:
        """Sum of what is known: of percentiles, so rather too high than too low."""
        seconds = [value for value in (self.of(role, each) for each in measurements) if value is not None]
        return sum(seconds) if seconds else None
