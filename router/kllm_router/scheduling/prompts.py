"""What a router remembers of its prompts, so that it can choose a prefill instance for the next one. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from kllm_router.scheduling.assigned import Assigned, Assignment
from kllm_router.scheduling.choices import Choice, Refusal
from kllm_router.scheduling.expected import Chain, ExpectedPrefixes, Mark
from kllm_router.scheduling.learning import PrefillLearner
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings, choose_prefill, own_seconds
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch

_TOLD_SECONDS = 1.0
"""Until a cache stream has told of a prompt that is computed."""
_UNTOLD_SECONDS = 600.0
"""For which a cache that nobody tells of is believed to keep a prompt."""


class Prompts:
    """Chooses, and learns from what came of it. `now` is monotonic seconds and never goes back.

    Attributes:
        expected: prefixes that instances will have.
        learner: what prompts take.

    Args:
        settings: how instances are judged.
    """

    def __init__(self, settings: PrefillSettings | None = None) -> None:
        settings = settings or PrefillSettings()
        self.expected = ExpectedPrefixes()
        self.learner = PrefillLearner(settings.timing, settings.credit)
        self._settings = settings
        self._assigned = Assigned()

    def candidates(
        self,
        seen: Sequence[PrefillCandidate],
        *,
        chain: Chain,
        matches: Mapping[str, PrefixMatch],
        now: float,
    ) -> list[PrefillCandidate]:
        """Instances as the router sees them, with what it remembers of each.

        Args:
            seen: their loads; what they have cached is not looked at.
            chain: hashes of the prompt's blocks.
            matches: what caches have told of it, by instance.
            now: monotonic seconds.
        """
        expected = self.expected.match(chain, now)
        return [
            PrefillCandidate(
                each.instance,
                each.age_seconds,
                matches.get(each.instance.id, NO_MATCH).with_expected(expected.get(each.instance.id, 0)),
                each.unreported_tokens,
                each.in_flight,
                self._assigned.pace(each.instance.id),
                self._assigned.pressure(each.instance.id, now),
            )
            for each in seen
        ]

    def choose(
        self,
        candidates: Sequence[PrefillCandidate],
        *,
        chain: Chain,
        prompt_tokens: int,
        now: float,
        rotation: int = 0,
        excluded: frozenset[str] = frozenset(),
    ) -> Choice | Refusal:
        """Pick one of what `candidates` returned; see `choose_prefill`."""
        depth = max((each.match.blocks for each in candidates), default=0)
        return choose_prefill(
            candidates,
            prompt_tokens=prompt_tokens,
            settings=self._settings,
            learned=self.learner,
            heat=self.expected.heat(chain, depth, now),
            rotation=rotation,
            excluded=excluded,
        )

    def sent(
        self, key: Hashable, candidate: PrefillCandidate, *, marks: Sequence[Mark], prompt_tokens: int, now: float
    ) -> None:
        """A prompt goes to an instance."""
        size, match = candidate.instance.page_size, candidate.match
        tokens = max(1, prompt_tokens - match.blocks * size)
        seconds = own_seconds(
            self.learner.timing, self.learner.credit, match, page_size=size, prompt_tokens=prompt_tokens
        )
        self.left(key, now)
        assignment = Assignment(
            candidate.instance.id, match, tuple(marks), tokens, seconds, step_seconds=self.learner.timing.a
        )
        self._assigned.send(key, assignment, now)
        self.expected.note(candidate.instance.id, marks, now)

    def uncached(self, key: Hashable) -> int | None:
        """Tokens of a prompt that its instance must compute; None when it is not on its way."""
        assignment = self._assigned.get(key)
        return None if assignment is None else assignment.tokens

    def computed(
        self, key: Hashable, *, new_tokens: int, cached_tokens: int, seconds: float, is_told: bool, now: float
    ) -> None:
        """A prompt's KV is complete.

        Args:
            key: of the prompt.
            new_tokens: that were computed.
            cached_tokens: that were not.
            seconds: from its first prefill step on.
            is_told: its instance tells of its cache, which says better what is there from here on.
            now: monotonic seconds.
        """
        assignment = self._assigned.settle(key)
        if assignment is not None:
            self.learner.observe(new_tokens, cached_tokens, seconds, match=assignment.match)
            kept = _TOLD_SECONDS if is_told else _UNTOLD_SECONDS
            self.expected.keep_until(assignment.instance_id, assignment.marks, now + kept)

    def left(self, key: Hashable, now: float) -> None:
        """A prompt has left its instance; one that was not computed is expected there no more."""
        assignment = self._assigned.settle(key)
        if assignment is not None:
            self.expected.keep_until(assignment.instance_id, assignment.marks, now)

    def forget(self, instance_id: str) -> None:
        """The instance has left, or is another process now."""
        self._assigned.forget(instance_id)
        self.expected.forget(instance_id)
