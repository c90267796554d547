"""Load per role, now and for any other count of instances: 1.0 is the boundary of the objective. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from kllm_core.fleet import Fleet
from kllm_core.objectives import Load, Objectives, Role
from kllm_core.timing import PRIOR, EngineTiming
from kllm_operator.plan.demand import Demand, Forecast, known
from kllm_operator.plan.outlook import Outlook
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.seen import Seen
from kllm_operator.plan.settings import LoadSettings
from kllm_operator.plan.terms import Terms


@dataclass(frozen=True)
class LoadModel:
    """Everything that load follows from, at one moment.

    Attributes:
        outlook: demand ahead; None: what arrives goes on as it is.
        one_pool: instances of decode compute prompts, too, and there is no other role: decode has the terms of both.
    """

    objectives: Objectives
    fleet: Fleet
    demand: Demand
    timing: EngineTiming = PRIOR
    settings: LoadSettings = field(default_factory=LoadSettings)
    outlook: Outlook | None = None
    one_pool: bool = False

    @cached_property
    def _now(self) -> Mapping[Role, RoleLoad]:
        forecast = self.demand.forecast
        asked = forecast if self.outlook is None else self.outlook.by_now(forecast)
        return {role: self._judge(role, self._seen.serving[role], asked, present=True) for role in Role}

    @cached_property
    def _seen(self) -> Seen:
        return Seen.of(self.fleet, self.settings.stale_after_seconds)

    @cached_property
    def _by_forecast(self) -> dict[Forecast, Terms]:
        return {}

    def now(self, role: Role) -> RoleLoad:
        """Load of the instances that serve now, with all that is queued there."""
        return self._now[role]

    def at(self, role: Role, count: int, *, lasting: bool = False, spare: float = 0.0) -> RoleLoad:
        """Forecast load if `count` instances served; none is judged as one.

        What is queued for prefill has the whole horizon to be worked off: a new instance that comes when the queue is
        gone helps nobody.

        Args:
            role: that is judged.
            count: of its instances.
            lasting: from now until the end of the outlook, and not only then.
            spare: part by which demand may be more than foreseen.
        """
        forecast = self.demand.forecast
        if self.outlook is not None:
            forecast = self.outlook.asked(role, forecast, lasting=lasting, spare=spare)
        elif spare and (rate := known(forecast.requests_per_second)) is not None:
            forecast = replace(forecast, requests_per_second=rate * (1 + spare))
        return self._judge(role, count, forecast, lasting=lasting)

    def _judge(
        self, role: Role, count: int, asked: Forecast, *, present: bool = False, lasting: bool = True
    ) -> RoleLoad:
        count = max(1, count)
        if self.one_pool and role is Role.PREFILL:
            return RoleLoad(role, count, Load.of(predicted=0.0, measured=None), 0.0, None, complete=True)
        model = self._terms(asked)
        terms = () if role is Role.PREFILL else model.decode(count, lasting=lasting)
        if self.one_pool or role is Role.PREFILL:
            terms = (*terms, model.prefill(count, present=present, lasting=lasting))
        judged = [(term.strain, term) for term in terms if term.strain is not None]
        if not judged:
            nothing = Load.of(predicted=None, measured=None)
            return RoleLoad(role, count, nothing, None, None, complete=False, terms=terms)
        strain, decided = max(judged, key=lambda pair: pair[0])
        return RoleLoad(role, count, decided.load, strain, decided.term, model.complete(role), terms)

    def _terms(self, asked: Forecast) -> Terms:
        if asked not in self._by_forecast:
            self._by_forecast[asked] = Terms(
                self.objectives,
                self._seen,
                replace(self.demand, forecast=asked),
                self.timing,
                self.settings,
                self.settings.horizon_seconds if self.outlook is None else self.outlook.seconds,
                self.one_pool,
            )
        return self._by_forecast[asked]
