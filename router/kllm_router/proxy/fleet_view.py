"""The router's picture of the fleet, kept by agents' streams; choices are made on it by `scheduling`."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import structlog

from kllm_core.fleet import Fleet
from kllm_core.objectives import Binding, Role
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import ApiError, Endpoint, EngineRequest, RequestWatch, SharedLoad, WatchedEvent
from kllm_router.limits import RequestLimits
from kllm_router.proxy import errors
from kllm_router.proxy.fleet_book import FleetBook, Follow, agent_follower
from kllm_router.proxy.journeys import Journeys
from kllm_router.proxy.record import Record
from kllm_router.scheduling.admission import AdmissionSettings, admit
from kllm_router.scheduling.binding import bind_after
from kllm_router.scheduling.choices import Choice, Refusal, Refused
from kllm_router.scheduling.decode import DecodeSettings, choose_decode
from kllm_router.scheduling.ejection import Ejection, EjectionSettings, Outliers
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings
from kllm_router.scheduling.prefix import NO_MATCH
from kllm_router.scheduling.share import NO_SHARE, Share
from kllm_router.scheduling.silence import Awaited, has_lost
from kllm_router.scheduling.slack import SlackAdmission
from kllm_router.shared.homes import Homes
from kllm_router.shared.local import Alone

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FleetViewSettings:
    """How the fleet is seen.

    Attributes:
        binding: when the decode instance is chosen, where the prefill instance can do it.
        gone_seconds: an instance whose agent was silent for so long gets nothing more.
        lost_seconds: after an agent's streams broke, its requests are given up unless it is back by then.
        silent_seconds: an engine that gave no sign of life for so long counts as lost, although its agent lives.
        hearing_seconds: so long after they were discovered, the fleet counts as known, whoever has not answered.
    """

    binding: Binding = Binding.LATE
    gone_seconds: float = 5.0
    lost_seconds: float = 1.0
    silent_seconds: float = 3.0
    hearing_seconds: float = 5.0
    ejection: EjectionSettings = field(default_factory=EjectionSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)


class AgentFleetView:
    """Implements `kllm_router.interfaces.FleetView`. Belongs to one event loop.

    Attributes:
        book: what is known of the fleet.
        expected: prefixes that instances will have, since prompts were sent there by this router or others.
        homes: where prompts went just now, to be told to other routers.

    Args:
        token: fleet token.
        clock: monotonic seconds.
        follow: makes the follower of an agent; by default it talks to the agent.
        on_ejection: told of every instance that is ejected.
        shared: what other routers do; None where there are none.
    """

    def __init__(
        self,
        *,
        token: str,
        settings: FleetViewSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        follow: Follow | None = None,
        on_ejection: Callable[[Role, Ejection], None] = lambda _role, _ejection: None,
        shared: SharedLoad | None = None,
    ) -> None:
        self._settings = settings or FleetViewSettings()
        self._clock = clock
        rng = rng or random.Random()  # noqa: S311  spreads reconnects and returns, guards nothing
        self._outliers = Outliers(self._settings.ejection, rng.random)
        self._on_ejection = on_ejection
        self._shared: SharedLoad = shared or Alone()
        self._journeys = Journeys(self._settings.prefill)
        self.expected = self._journeys.prompts.expected
        self.homes = Homes()
        self.book = FleetBook(
            follow=follow or agent_follower(token, rng),
            lost_seconds=self._settings.lost_seconds,
            silent_seconds=self._settings.silent_seconds,
            clock=clock,
            on_new=self._is_new,
            on_milestone=self._milestone,
        )
        self._slack = SlackAdmission(self._settings.admission.slack)
        self._rotation = itertools.count()
        self._known = False

    # --- FleetView

    @property
    def ready(self) -> bool:
        """Whether at least one prefill and one decode instance take requests."""
        now = self._clock()
        roles = {record.instance.role for record in self._usable(now) if record.instance.takes_requests}
        return roles == set(Role)

    @property
    def known(self) -> bool:
        """Whether the instances are known; see `FleetView`."""
        since = self.book.discovered_at
        if not self._known and since is not None:
            heard = all(record.heard_at is not None for record in self.book.ordered)
            self._known = heard or self._clock() - since >= self._settings.hearing_seconds
        return self._known

    def choose_prefill(
        self, request: EngineRequest, *, excluded: frozenset[str] = frozenset(), prefer: str = ""
    ) -> Endpoint:
        """Pick a prefill instance; see `FleetView`."""
        now = self._clock()
        usable = self._usable(now)
        prefill = self._pool(usable, Role.PREFILL, now, excluded=excluded, prefer=prefer)
        chain = self._journeys.chain(request, prefill[0].instance.page_size) if prefill else ()
        prompts = self._journeys.prompts
        candidates = prompts.candidates(
            [record.prefill_candidate(now, others=self._others(record.id, now)) for record in prefill],
            chain=chain,
            matches=self.book.index.match(chain),
            now=now,
        )
        is_new = not excluded and not prefer  # one that is in already is not kept out
        if is_new:
            decode = [
                r.decode_candidate(now, self._others(r.id, now)) for r in usable if r.instance.role is Role.DECODE
            ]
            in_flight = self.book.in_flight
            refusal = admit(candidates, decode, in_flight=in_flight, settings=self._settings.admission)
            if refusal is not None:
                raise _error(refusal)
        choice = prompts.choose(
            candidates,
            chain=chain,
            prompt_tokens=len(request.input_ids),
            now=now,
            rotation=next(self._rotation),
            excluded=excluded,
        )
        endpoint = self._decided(request, choice)
        if isinstance(choice, Choice):
            if is_new:
                self._check_slack(request, choice, instances=self._own_part(candidates), now=now)
            self.homes.settle(endpoint.instance_id, self._journeys.sent(request, choice, candidates, now=now), now)
        return endpoint

    def choose_decode(
        self, request: EngineRequest, prefill: Endpoint, *, excluded: frozenset[str] = frozenset()
    ) -> Endpoint:
        """Pick a decode instance; see `FleetView`."""
        now = self._clock()
        pool = self._pool(self._usable(now), Role.DECODE, now, excluded=excluded)
        tokens = len(request.input_ids)
        found = self.book.index.match(self._journeys.chain(request, pool[0].instance.page_size)) if pool else {}
        moved = {r.id: tokens - found.get(r.id, NO_MATCH).device * r.instance.page_size for r in pool}
        transfers = self._journeys.transfers
        decision = choose_decode(
            [record.decode_candidate(now, self._others(record.id, now)) for record in pool],
            prompt_tokens=tokens,
            max_new_tokens=request.max_new_tokens,
            transfer_seconds={
                name: transfers.estimate(prefill.instance_id, name, max(0, left)) for name, left in moved.items()
            },
            settings=self._settings.decode,
            rotation=next(self._rotation),
            excluded=excluded,
        )
        endpoint = self._decided(request, decision)
        self._journeys.bound(request, prefill.instance_id, endpoint.instance_id, now=now)
        return endpoint

    async def changed(self) -> None:
        """Wait until an instance may have begun to take requests; see `FleetView`."""
        await self.book.changed()

    def judge(self, endpoint: Endpoint, *, passed: bool) -> None:
        """Learn how an instance did; see `FleetView`."""
        record = self.book.records.get(endpoint.instance_id)
        if record is None or record.instance.incarnation != endpoint.incarnation:
            return
        if passed:
            self._outliers.passed(endpoint.instance_id)
        elif (ejection := self._outliers.failed(endpoint.instance_id, self._clock())) is not None:
            _log.warning(
                "instance ejected",
                instance=endpoint.instance_id,
                reason=ejection.reason,
                message=ejection.message,
                seconds=round(ejection.until - self._clock(), 1),
            )
            self._on_ejection(endpoint.role, ejection)

    def has_lost(self, endpoint: Endpoint, quiet_seconds: float, awaited: Awaited) -> bool:
        """Whether a silent instance no longer has a request; see `FleetView`."""
        record = self.book.records.get(endpoint.instance_id)
        if record is None or record.instance.incarnation != endpoint.incarnation:
            return True
        return has_lost(record.signs(self._clock()), quiet_seconds=quiet_seconds, awaited=awaited)

    def ejected(self, role: Role) -> int:
        """How many instances of a role are ejected now."""
        now = self._clock()
        records = [record for record in self.book.ordered if record.instance.role is role]
        return sum(self._outliers.until(record.id, now) is not None for record in records)

    def binding(self, prefill: Endpoint) -> Binding:
        """When to choose the decode instance: the wish, or what the instance can do that comes next to it."""
        record = self.book.records.get(prefill.instance_id)
        able = record.instance.bindings if record is not None else frozenset[Binding]()
        wish = self._settings.binding
        # Just in time is late binding that asks a little sooner: an engine that can do the one can do the other.
        needed = Binding.LATE if wish is Binding.JUST_IN_TIME else wish
        return wish if needed in able else Binding.EARLY

    def bind_after(self, request: EngineRequest) -> float | None:
        """When to ask a decode instance just in time; see `FleetView`."""
        predicted = self._journeys.predicted(request.rid)
        if predicted is None:
            return None
        return bind_after(predicted, handshake_seconds=self._journeys.transfers.handshake_seconds)

    def watch(self, rid: str, endpoint: Endpoint) -> AbstractContextManager[RequestWatch]:
        """Subscribe to the events of a request; see `FleetView`."""
        return self.book.watch(rid, endpoint)

    def started(self, rid: str, endpoint: Endpoint, tokens: int) -> None:
        """Count a request as in flight; see `FleetView`."""
        uncached = self._journeys.prompts.uncached(rid) if endpoint.role is Role.PREFILL else None
        self.book.enter(rid, endpoint, tokens if uncached is None else min(uncached, tokens))

    def finished(self, rid: str, endpoint: Endpoint) -> None:
        """Take back `started`; see `FleetView`."""
        if endpoint.role is Role.PREFILL:
            self._journeys.left(rid, self._clock())
        self.book.leave(rid, endpoint)

    def status(self) -> dict[str, Any]:
        """Instances with states and loads, for people."""
        now = self._clock()
        told = self._shared.status()
        shared = {} if told is None else {"shared": told}
        return {
            "ready": self.ready,
            "binding": self._settings.binding.value,
            "in_flight": self.book.in_flight,
            "indexed_blocks": self.book.index.blocks,
            **shared,
            "instances": [
                record.shown(now, self.book.index.held(record.id), ejected_until=self._outliers.until(record.id, now))
                for record in self.book.ordered
            ],
        }

    # --- more that is known

    def shares(self) -> dict[str, Share]:
        """What this router has on each instance that it has anything on."""
        return {record.id: share for record in self.book.ordered if (share := record.share) != NO_SHARE}

    def limits(self) -> RequestLimits:
        """What one request may take on the instances that serve now."""
        serving = [record for record in self.book.ordered if record.instance.takes_requests]
        contexts = [r.instance.context_tokens for r in serving if r.instance.context_tokens]
        rooms = [r.kv_total_tokens for r in serving if r.instance.role is Role.DECODE and r.kv_total_tokens]
        return RequestLimits(min(contexts, default=None), max(rooms, default=None))

    def fleet(self) -> Fleet:
        """All instances as one immutable snapshot."""
        return Fleet(self._clock(), {record.id: record.instance for record in self.book.ordered})

    async def run(self, discovered: AsyncIterator[list[DiscoveredInstance]]) -> None:
        """Follow discovery until it ends or this is cancelled."""
        await self.book.run(discovered)

    # --- inside

    def _own_part(self, candidates: Sequence[PrefillCandidate]) -> float:
        """Prefill instances that are this router's part, by what it has in flight among all routers."""
        own = sum(self.book.records[each.instance.id].in_flight for each in candidates)
        whole = sum(each.in_flight for each in candidates)
        return len(candidates) * ((own + 1) / (whole + 1))

    def _check_slack(self, request: EngineRequest, choice: Choice, *, instances: float, now: float) -> None:
        cost = choice.cost
        refusal = self._slack.decide(
            request.key,
            own_seconds=cost.own_seconds,
            wait_seconds=cost.wait_seconds,
            handover_seconds=self._journeys.transfers.usual(len(request.input_ids)),
            instances=instances,
            now=now,
        )
        if refusal is not None:
            raise _error(refusal)

    def _milestone(self, rid: str, event: WatchedEvent) -> None:
        is_told = self.book.index.held(event.instance_id) > 0
        self._journeys.heard(rid, event, is_told=is_told, now=self._clock())

    def _is_new(self, instance_id: str) -> None:
        self._outliers.forget(instance_id)
        self._journeys.forget(instance_id)

    def _others(self, instance_id: str, now: float) -> Share:
        return self._shared.of(instance_id, now)

    def _usable(self, now: float) -> list[Record]:
        """Instances with an endpoint that give signs of life, and whose agents have been heard lately."""
        oldest = now - self._settings.gone_seconds
        return [
            r
            for r in self.book.ordered
            if r.endpoint is not None and r.heard_at is not None and r.heard_at >= oldest and not (r.lost or r.silent)
        ]

    def _pool(
        self, usable: list[Record], role: Role, now: float, *, excluded: frozenset[str], prefer: str = ""
    ) -> list[Record]:
        """Instances of a role to choose from, without those that are ejected while others can serve."""
        pool = [record for record in usable if record.instance.role is role]
        able = {record.id for record in pool if record.instance.takes_requests and record.id not in excluded}
        if prefer in able:
            return [record for record in pool if record.id == prefer]
        out = self._outliers.left_out(able, now)
        return [record for record in pool if record.id not in out] if out else pool

    def _decided(self, request: EngineRequest, decision: Choice | Refusal) -> Endpoint:
        if isinstance(decision, Refusal):
            _log.info("no instance", rid=request.rid, reason=decision.reason.value, message=decision.message)
            raise _error(decision)
        _log.debug("chosen", rid=request.rid, instance=decision.instance_id, reason=decision.reason, decision=decision)
        endpoint = self.book.records[decision.instance_id].endpoint
        if endpoint is None:
            raise RuntimeError(f"{decision.instance_id} was chosen and has no endpoint")
        return endpoint


def _error(refusal: Refusal) -> ApiError:
    if refusal.reason is Refused.TOO_LARGE:
        return ApiError(400, refusal.message, code="context_length_exceeded")
    if refusal.reason is Refused.OVERLOADED:
        return errors.rate_limited(refusal.message, retry_after=refusal.retry_after_seconds)
    return errors.unavailable(refusal.message, code="no_instance")
