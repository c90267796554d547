"""Fair chunked prefill: short prompts do not wait for long ones, and each long one ends. Pure.

The unit is the chunk, the new tokens of one prefill step. Prompts of which no more than a chunk is left to be computed
go first, in order of arrival. A longer one is computed chunk by chunk. When short ones wait it gives way at the end of
a chunk, keeps the KV that it has, and goes on from there. Each time that it gave way its quota grows, which is what it
may take of its next step before short ones: from a small share of the KV budget, doubled each time, up to the chunk.
So a prompt whose turn it is gets at least every second chunk in the end, whatever else arrives.

Small steps are quick, so that short prompts have a step to themselves where they can. But the smallest step takes some
time too: only a bounded share of the engine's capacity is spent in this way, and beyond that a long prompt fills the
chunk.

Among long prompts the first that is due has the turn. A later one is due before it if it is much shorter, but all that
overtake a prompt have no more tokens together than half of its own. They begin in that order too, as soon as the KV
budget holds the next one beside those in progress.

Engines go on with one begun prompt in a step at most, beside any number of new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_SLACK = 1.5
"""Weight of a long prompt's own tokens beside those of all that came before it. What comes later has this prompt's
tokens before it as well, so that 1 would be the order of arrival, and what is above 1 is the share of this prompt's
tokens that may overtake it."""

_FIRST_QUOTA_SHARE = 1 / 512
"""Of the KV budget."""

_STEP_SHARE = 1 / 16
"""Of the time of a full step: what the smallest one takes."""

_POOL_SHARE = 0.5
"""Of the KV pool, for long prompts in progress: decoding, and prompts that are parked, need room too."""

_SPENT_SHARE = 0.03
"""Of the engine's capacity: what may be spent on steps that short prompts have to themselves."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is not computed yet, or in part.

    Attributes:
        key: unique among those that wait.
        tokens: KV that it needs in the end.
        rest: tokens that are still to be computed, at least 1.
        begun: chunks of it were computed, and it holds their KV.
    """

    key: str
    tokens: int
    rest: int
    begun: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rest <= self.tokens:
            raise ValueError(f"rest of {self.key} must be between 1 and its {self.tokens} tokens, got {self.rest}")


@dataclass(frozen=True, slots=True)
class Turn:
    """What enters the next step.

    Attributes:
        whole: keys of the prompts that are computed to their end, in order.
        part: key of the prompt of which a part is computed; None: of none.
        part_tokens: new tokens of that part, at most.
        reason: OnlyShort, OnlyLong, LongGaveWay, LongTookQuota, NothingFits or Nothing.
        message: the same in words.
    """

    whole: tuple[str, ...]
    part: str | None
    part_tokens: int
    reason: str
    message: str


@dataclass(slots=True)
class _Ticket:
    """What is remembered of a long prompt.

    Attributes:
        due: the smaller, the sooner it has the turn.
        yields: how often it gave way.
        quota: tokens that it may take before short ones in its next step.
    """

    due: float
    yields: int = 0
    quota: int = 0


@dataclass
class FairPrefill:
    """The order of one engine's prompts.

    Args:
        chunk_tokens: new tokens of one step, at most.
        budget_tokens: KV that long prompts in progress may need together; a single one may need more.
        page_tokens: KV is allotted in pages of so many tokens, and a part of a prompt ends with one.

    Raises:
        ValueError: a number is not positive, or a chunk is smaller than a page.
    """

    chunk_tokens: int
    budget_tokens: int
    page_tokens: int = 1
    _computed: int = 0
    _offered: int = 0
    _spent: float = 0.0
    _tickets: dict[str, _Ticket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "budget_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.chunk_tokens < self.page_tokens:
            raise ValueError(f"a chunk of {self.chunk_tokens} tokens holds no page of {self.page_tokens}")

    @classmethod
    def of_pool(cls, kv_tokens: int, *, chunk_tokens: int, page_tokens: int = 1) -> FairPrefill:
        """The order of an engine with so large a KV pool.

        Args:
            kv_tokens: that the pool holds.
            chunk_tokens: new tokens of one step, at most.
            page_tokens: KV is allotted in pages of so many tokens.
        """
        return cls(chunk_tokens, max(chunk_tokens, int(kv_tokens * _POOL_SHARE)), page_tokens)

    def turn(self, prompts: Sequence[Prompt], *, tokens: int | None = None) -> Turn:
        """Decide on the next step, and count it as done.

        Args:
            prompts: all that wait, in order of arrival.
            tokens: new tokens that the step can take; a chunk if left out.
        """
        room = self._floor(self.chunk_tokens if tokens is None else min(tokens, self.chunk_tokens))
        short = [prompt for prompt in prompts if self._ceil(prompt.rest) <= room]
        long = [prompt for prompt in prompts if self._ceil(prompt.rest) > room]
        self._remember(long)
        head = self._head(long)
        if head is None:
            whole, _ = self._fitting(short, room, may_go_on=True)
            turn = _short_turn(whole)
        else:
            turn = self._with_head(head, short, room)
        rests = {prompt.key: prompt.rest for prompt in short}
        self._computed += sum(rests[key] for key in turn.whole) + turn.part_tokens
        return turn

    def _with_head(self, head: Prompt, short: Sequence[Prompt], room: int) -> Turn:
        ticket = self._tickets[head.key]
        quota = min(ticket.quota, room)
        whole, left = self._fitting(short, room - quota, may_go_on=not (quota and head.begun))
        continues = head.begun and any(prompt.begun for prompt in short if prompt.key in whole)
        if whole and not quota and (continues or left < self.page_tokens or self._affords_a_step()):
            self._raise_quota(ticket)
            message = f"{head.key} gave way to {len(whole)} short prompts; its next quota is {ticket.quota} tokens"
            return Turn(tuple(whole), None, 0, "LongGaveWay", message)
        part = left + quota
        if not part:
            return Turn((), None, 0, "NothingFits", "the step has no room for a page")
        ticket.quota = 0
        reason = "LongTookQuota" if short else "OnlyLong"
        return Turn(tuple(whole), head.key, part, reason, f"{part} tokens of {head.key}, {len(whole)} short prompts")

    def _affords_a_step(self) -> bool:
        """Whether the time that a step takes however small it is may be spent on short prompts alone."""
        step = self.chunk_tokens * _STEP_SHARE
        if self._spent + step > _SPENT_SHARE * self._computed:
            return False
        self._spent += step
        return True

    def _raise_quota(self, ticket: _Ticket) -> None:
        first = max(self.page_tokens, int(self.budget_tokens * _FIRST_QUOTA_SHARE))
        # The exponent is bounded for the sake of the number: the quota reaches the chunk before.
        raised = first << min(ticket.yields, 32)
        ticket.quota = max(self.page_tokens, self._floor(min(self.chunk_tokens, raised)))
        ticket.yields += 1

    def _remember(self, long: Sequence[Prompt]) -> None:
        known, self._tickets = self._tickets, {}
        for prompt in long:
            ticket = known.get(prompt.key)
            if ticket is None:
                ticket = _Ticket(self._offered + _SLACK * prompt.tokens)
                self._offered += prompt.tokens
            self._tickets[prompt.key] = ticket

    def _head(self, long: Sequence[Prompt]) -> Prompt | None:
        """Whose turn it is: the first that is due of those in progress and the one that begins next, if it can."""

        def due(prompt: Prompt) -> float:
            return self._tickets[prompt.key].due

        begun = [prompt for prompt in long if prompt.begun]
        new = [prompt for prompt in long if not prompt.begun]
        if new:
            following = min(new, key=due)
            if not begun or sum(prompt.tokens for prompt in begun) + following.tokens <= self.budget_tokens:
                return min([*begun, following], key=due)
        return min(begun, key=due, default=None)

    def _fitting(self, short: Sequence[Prompt], room: int, *, may_go_on: bool) -> tuple[list[str], int]:
        """Those that fit, in order, and the room that is left; one that does not fit lets no later one pass.

        Args:
            short: candidates in order of arrival.
            room: tokens, whole pages.
            may_go_on: one of those that have begun may be among them.
        """
        keys: list[str] = []
        for prompt in short:
            if prompt.begun and not may_go_on:
                continue
            needed = self._ceil(prompt.rest)
            if needed > room:
                break
            keys.append(prompt.key)
            room -= needed
            may_go_on = may_go_on and not prompt.begun
        return keys, room

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _floor(self, tokens: int) -> int:
        return tokens // self.page_tokens * self.page_tokens


def _short_turn(whole: Sequence[str]) -> Turn:
    if not whole:
        return Turn((), None, 0, "Nothing", "no prompt waits")
    return Turn(tuple(whole), None, 0, "OnlyShort", f"{len(whole)} short prompts")
