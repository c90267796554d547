"""Looks at instances, and notices what has become of them since the last look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.fleet.snapshot import Snapshot, Trust, snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.loop.capacity import Arrival, CapacityBook
from kllm_operator.loop.crashes import Crashes, Pause
from kllm_operator.loop.events import Event, Failed, Serving
from kllm_operator.plan.demand import Forecast, Stages
from kllm_operator.substrate.base import Observed, StartPhase, Substrate


class Heard(Protocol):
    """What is heard of the service."""

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each report that tells something new."""

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Follow exactly these agents: host:port by instance."""

    def forecast(self, now: float) -> Forecast:
        """What will arrive."""

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the present capacity took."""


@dataclass(frozen=True)
class LastStart:
    """The last start in a role.

    Attributes:
        source: from where; None if this loop did not decide it.
        seconds: from the decision to serving, or the sum of its phases if this loop did not decide it.
        phases: as far as they were told.
    """

    instance_id: str
    source: StartFrom | None
    seconds: float | None
    phases: tuple[StartPhase, ...] = ()


class Looking:
    """Looks at a substrate through what its agents tell.

    Attributes:
        trust: for how long what was told is believed.

    Args:
        substrate: where instances live.
        heard: what they tell.
        book: learns when capacity changed.
        crashes: learns what failed.
        tell: hears of what began to serve and of what failed; must not wait or raise.
        clock: monotonic seconds.
        trust: for how long what was told is believed.
    """

    def __init__(
        self,
        substrate: Substrate,
        heard: Heard,
        *,
        book: CapacityBook,
        crashes: Crashes,
        tell: Callable[[Event], None],
        clock: Callable[[], float],
        trust: Trust,
    ) -> None:
        self._substrate, self._heard, self._book, self._crashes = substrate, heard, book, crashes
        self._tell, self._clock, self.trust = tell, clock, trust
        self._observed: Sequence[Observed] = ()
        self._failed: set[str] = set()
        self._served_since: dict[str, float] = {}
        self._starts: dict[Role, LastStart] = {}

    async def look(self, *, unflippable: frozenset[str]) -> Snapshot:
        """All instances as they are now.

        Args:
            unflippable: instances whose switch of role was refused or failed.
        """
        now = self._clock()
        observed = self._observed = await self._substrate.observe()
        self._heard.follow({each.id: each.agent for each in observed if each.agent and not each.ending})
        for role in Role:
            self._crashes.expect(role, self._substrate.revision(role))
        seen = snapshot(
            observed, self._heard.told, now=now, unflippable=unflippable, unproven=self._unproven(observed, now),
            trust=self.trust,
        )  # fmt: skip
        for arrival in self._book.observe(seen.fleet, now=now):
            self._tell(Serving(arrival))
            self._arrived(arrival, seen)
        serving = (each.id for role in Role for each in seen.fleet.serving(role))
        since = {name: self._served_since.get(name, now) for name in serving}
        for each in seen.observed:
            if each.state is InstanceState.FAILED and not each.ending and each.id not in self._failed:
                self._failed.add(each.id)
                self._book.forget(each.id)
                served = now - self._served_since.pop(each.id, now)
                self._tell(Failed(each.id, each.role, each.message, self._pause(each, served, now).words))
        for role in {each.role for each in seen.observed if _serves_now(each)}:
            self._crashes.serves(role)
        self._failed &= {each.id for each in seen.observed}
        self._served_since = since
        return seen

    def listen(self, *, unflippable: frozenset[str]) -> Snapshot:
        """The instances of the last look, with what they have told since; what has become of them is not noticed.

        Args:
            unflippable: instances whose switch of role was refused or failed.
        """
        now = self._clock()
        unproven = self._unproven(self._observed, now)
        return snapshot(
            self._observed, self._heard.told, now=now, unflippable=unflippable, unproven=unproven, trust=self.trust
        )

    def last_start(self, role: Role, seen: Snapshot) -> LastStart | None:
        """The last start in a role, as far as anything shows it."""
        if role in self._starts:
            return self._starts[role]
        serving = (each for each in seen.observed if each.role is role and each.state is InstanceState.SERVING)
        youngest = min((each for each in serving if each.phases), key=lambda each: each.age_seconds, default=None)
        if youngest is None:
            return None
        return LastStart(youngest.id, None, sum(each.seconds for each in youngest.phases), youngest.phases)

    def _unproven(self, observed: Sequence[Observed], now: float) -> frozenset[str]:
        settled = self._crashes.settings.proven_seconds
        return frozenset(each.id for each in observed if now - self._served_since.get(each.id, now) < settled)

    def _arrived(self, arrival: Arrival, seen: Snapshot) -> None:
        if arrival.how == "Start":
            phases = next((each.phases for each in seen.observed if each.id == arrival.instance_id), ())
            start = LastStart(arrival.instance_id, arrival.source, arrival.seconds, phases)
            self._starts[arrival.role] = start

    def _pause(self, failed: Observed, served_seconds: float, now: float) -> Pause:
        if failed.outdated:
            # What is of another revision now says nothing of what starts next.
            return Pause(1, 0.0)
        return self._crashes.failed(
            failed.role, now=now, served_seconds=served_seconds, message=failed.message, reason=failed.reason
        )


def _serves_now(instance: Observed) -> bool:
    """Whether it serves, and a start would make one like it."""
    return instance.state is InstanceState.SERVING and not instance.outdated
