"""Which instance a request goes to: kLLM's router, or a plain rule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm.sim.scenario import Routing
from kllm_router.scheduling.admission import AdmissionSettings, admit
from kllm_router.scheduling.choices import Choice, Refusal, Refused
from kllm_router.scheduling.decode import DecodeCandidate, DecodeSettings, choose_decode
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings, choose_prefill
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch

_NONE = Refusal(Refused.NONE_SERVING, "no instance serves")


class Chooser:
    """Chooses as one router does, from what it has seen of instances.

    Args:
        routing: how.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._rotation = itertools.count()
        self._admission, self._prefill, self._decode = AdmissionSettings(), PrefillSettings(), DecodeSettings()

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
        if self._routing is not Routing.KLLM:
            return self._plain(able)
        candidates = [_prefill_candidate(each, flight, now) for each in able]
        if decode is not None:
            others = [_decode_candidate(each, now) for each in decode]
            refusal = admit(candidates, others, in_flight=in_flight, settings=self._admission)
            if refusal is not None:
                return refusal
        choice = choose_prefill(
            candidates, prompt_tokens=flight.prompt_tokens, settings=self._prefill, rotation=next(self._rotation)
        )
        return _chosen(choice, able)

    def decode(
        self, flight: Flight, able: Sequence[Instance], transfer_seconds: Mapping[str, float], *, now: float
    ) -> Instance | Refusal:
        """Where it generates.

        Args:
            flight: whose prompt is computed.
            able: instances that serve.
            transfer_seconds: of its KV, by instance.
            now: simulated seconds.
        """
        if self._routing is not Routing.KLLM:
            return self._plain(able)
        choice = choose_decode(
            [_decode_candidate(each, now) for each in able],
            prompt_tokens=flight.prompt_tokens,
            transfer_seconds=transfer_seconds,
            settings=self._decode,
            rotation=next(self._rotation),
        )
        return _chosen(choice, able)

    def _plain(self, able: Sequence[Instance]) -> Instance | Refusal:
        if not able:
            return _NONE
        turn = next(self._rotation)
        if self._routing is Routing.ROUND_ROBIN:
            return able[turn % len(able)]
        fewest = min(len(each.flights) for each in able)
        idle = [each for each in able if len(each.flights) == fewest]
        return idle[turn % len(idle)]


def match(instance: Instance, flight: Flight) -> PrefixMatch:
    """How much of a prompt an instance has cached."""
    if instance.engine is None or not flight.blocks:
        return NO_MATCH
    found = instance.engine.pool.cache.match(flight.blocks)
    return PrefixMatch(device=found.device, host=found.host) if found.blocks else NO_MATCH


def _prefill_candidate(instance: Instance, flight: Flight, now: float) -> PrefillCandidate:
    seen, age = instance.look(now)
    return PrefillCandidate(seen, age, match(instance, flight), instance.unreported[1], len(instance.flights))


def _decode_candidate(instance: Instance, now: float) -> DecodeCandidate:
    seen, age = instance.look(now)
    return DecodeCandidate(seen, age, *instance.unreported, len(instance.flights))


def _chosen(choice: Choice | Refusal, able: Sequence[Instance]) -> Instance | Refusal:
    if isinstance(choice, Refusal):
        return choice
    return next(each for each in able if each.id == choice.instance_id)
