"""Which instance a request goes to: kLLM's router, or the rule of another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm.sim.routing_rules import CacheAware, DynamoCost, LeastLoad, LlmdWeights, RoundRobin, Rule
from kllm.sim.scenario import Routing
from kllm_router.scheduling.admission import AdmissionSettings, admit
from kllm_router.scheduling.binding import bind_after
from kllm_router.scheduling.choices import Choice, Refusal, Refused
from kllm_router.scheduling.decode import DecodeCandidate, DecodeSettings, choose_decode
from kllm_router.scheduling.expected import marks
from kllm_router.scheduling.prefill import PrefillCandidate
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch
from kllm_router.scheduling.prompts import Prompts
from kllm_router.scheduling.slack import SlackAdmission
from kllm_router.scheduling.transfers import TransferTimes

_NONE = Refusal(Refused.NONE_SERVING, "no instance serves")
_RULES: Mapping[Routing, Callable[[Iterator[int]], Rule]] = {
    Routing.ROUND_ROBIN: RoundRobin,
    Routing.LEAST_LOAD: LeastLoad,
    Routing.DYNAMO: DynamoCost,
    Routing.CACHE_AWARE: CacheAware,
    Routing.LLM_D: LlmdWeights,
}


class Chooser:
    """Chooses as one router does, from what it has seen of instances.

    Args:
        routing: how.
        admission: who is let in; other routers let everybody in.
    """

    def __init__(self, routing: Routing, *, admission: AdmissionSettings | None = None) -> None:
        admission = admission or AdmissionSettings()
        self._rotation = itertools.count()
        self._rule = None if routing is Routing.KLLM else _RULES[routing](self._rotation)
        self._admission, self._slack, self._decode = admission, SlackAdmission(admission.slack), DecodeSettings()
        self._prompts = Prompts()
        self._predicted: dict[Flight, float] = {}
        self._transfers = TransferTimes()

    def prefill(
        self, flight: Flight, able: Sequence[Instance], decode: Sequence[Instance] | None, *, in_flight: int, now: float
    ) -> Instance | Refusal:
        """Where a prompt is computed.

        Args:
            flight: that comes, or comes again.
            able: instances that serve.
            decode: those that would take it over; None: it is in already, or there are none in this service.
            in_flight: requests in the house.
            now: simulated seconds.
        """
        if self._rule is not None:
            return self._rule.prefill(flight, able, now) if able else _NONE
        candidates = self._prompts.candidates(
            [_prefill_candidate(each, now) for each in able],
            chain=flight.blocks,
            matches={each.id: match(each, flight) for each in able},
            now=now,
        )
        if decode is not None:
            others = [_decode_candidate(each, now) for each in decode]
            refusal = admit(candidates, others, in_flight=in_flight, settings=self._admission)
            if refusal is not None:
                return refusal
        choice = self._prompts.choose(
            candidates,
            chain=flight.blocks,
            prompt_tokens=flight.prompt_tokens,
            now=now,
            rotation=next(self._rotation),
        )
        if isinstance(choice, Choice):
            if decode is not None and (late := self._late(flight, choice, instances=len(able), now=now)) is not None:
                return late
            self._predicted[flight] = choice.cost.seconds
            chosen = next(each for each in candidates if each.instance.id == choice.instance_id)
            self._prompts.sent(flight, chosen, marks=marks(flight.blocks), prompt_tokens=flight.prompt_tokens, now=now)
        return _chosen(choice, able)

    def decode(self, flight: Flight, able: Sequence[Instance], *, now: float) -> Instance | Refusal:
        """Where it generates.

        Args:
            flight: whose prompt is computed.
            able: instances that serve.
            now: simulated seconds.
        """
        if self._rule is not None:
            return self._rule.decode(flight, able, now) if able else _NONE
        choice = choose_decode(
            [_decode_candidate(each, now) for each in able],
            prompt_tokens=flight.prompt_tokens,
            transfer_seconds={
                each.id: self._transfers.estimate(_id(flight.prefill), each.id, flight.prompt_tokens) for each in able
            },
            settings=self._decode,
            rotation=next(self._rotation),
        )
        return _chosen(choice, able)

    def _late(self, flight: Flight, choice: Choice, *, instances: int, now: float) -> Refusal | None:
        cost = choice.cost
        return self._slack.decide(
            flight.key,
            own_seconds=cost.own_seconds,
            wait_seconds=cost.wait_seconds,
            handover_seconds=self._transfers.usual(flight.prompt_tokens),
            instances=instances,
            now=now,
        )

    def prefilled(self, flight: Flight, seconds: float, cached_tokens: int, *, now: float) -> None:
        """A prompt is computed: what it took is learned from."""
        self._prompts.computed(
            flight,
            new_tokens=flight.prompt_tokens - cached_tokens,
            cached_tokens=cached_tokens,
            seconds=seconds,
            is_told=True,
            now=now,
        )

    def uncached(self, flight: Flight, instance: Instance) -> int:
        """Tokens of a prompt that an instance must compute, as far as the router knows."""
        known = self._prompts.uncached(flight)
        size = instance.working.spec.block_tokens
        return max(1, flight.prompt_tokens - match(instance, flight).blocks * size) if known is None else known

    def moved(self, flight: Flight, *, now: float) -> None:
        """Its KV has left prefill: what that took is learned from."""
        if flight.prefill is not None and flight.decode is not None and None not in (flight.bound_at, flight.parked_at):
            since = max(flight.bound_at or 0.0, flight.parked_at or 0.0)
            self._transfers.observe(flight.prefill.id, flight.decode.id, flight.prompt_tokens, now - since)

    def bind_after(self, flight: Flight) -> float | None:
        """Seconds from sending a prompt until its decode instance is asked just in time."""
        predicted = self._predicted.get(flight)
        return None if predicted is None else bind_after(predicted, handshake_seconds=self._transfers.handshake_seconds)

    def left(self, flight: Flight, now: float) -> None:
        """A request has left its instances."""
        self._prompts.left(flight, now)
        self._predicted.pop(flight, None)


def match(instance: Instance, flight: Flight) -> PrefixMatch:
    """How much of a prompt an instance has cached."""
    if instance.engine is None or not flight.blocks:
        return NO_MATCH
    found = instance.engine.pool.cache.match(flight.blocks)
    return PrefixMatch(device=found.device, host=found.host) if found.blocks else NO_MATCH


def _id(instance: Instance | None) -> str:
    return "" if instance is None else instance.id


def _prefill_candidate(instance: Instance, now: float) -> PrefillCandidate:
    seen, age = instance.look(now)
    return PrefillCandidate(seen, age, NO_MATCH, instance.unreported[1], len(instance.flights))


def _decode_candidate(instance: Instance, now: float) -> DecodeCandidate:
    seen, age = instance.look(now)
    return DecodeCandidate(seen, age, *instance.unreported, len(instance.flights))


def _chosen(choice: Choice | Refusal, able: Sequence[Instance]) -> Instance | Refusal:
    if isinstance(choice, Refusal):
        return choice
    return next(each for each in able if each.id == choice.instance_id)
