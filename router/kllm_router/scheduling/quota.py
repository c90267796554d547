"""What a key may take at a time and in a minute, and what it has taken. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from kllm_router.scheduling.choices import Refusal, Refused

MINUTE_SECONDS = 60.0
_SLOT_SECONDS = 2.0
"""Requests of one slot are counted together: a sliding minute is right to this."""
_MOST_RETRY_SECONDS = MINUTE_SECONDS + _SLOT_SECONDS
_RUNNING_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Quota:
    """Bounds of one key, over all routers of a service; None is no bound.

    Attributes:
        requests_per_minute: requests that were let in during the last minute.
        tokens_per_minute: their prompt tokens, and the output tokens that have ended in it.
        concurrency: requests that run.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def bounds(self) -> bool:
        """Whether there is any bound."""
        return self != NO_QUOTA


NO_QUOTA = Quota()


class Spent(NamedTuple):
    """What a key has taken.

    Attributes:
        running: requests that run.
        requests: of the last minute.
        tokens: of the last minute.
    """

    running: int = 0
    requests: int = 0
    tokens: int = 0

    def plus(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(self.running + other.running, self.requests + other.requests, self.tokens + other.tokens)

    def aged(self, seconds: float) -> Spent:
        """What may be left of it so long after it was told: nothing runs for sure, and the minute goes by."""
        left = max(0.0, 1.0 - seconds / MINUTE_SECONDS)
        return Spent(0, int(self.requests * left), int(self.tokens * left))


NOTHING = Spent()


@dataclass
class _Slot:
    begins: float
    requests: int = 0
    tokens: int = 0


class Use:
    """What one key has taken here."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._running = 0
        self._requests = 0
        self._tokens = 0

    def enter(self, now: float) -> None:
        """A request was let in."""
        self._running += 1
        self._add(now, requests=1)

    def take(self, tokens: int, now: float) -> None:
        """Tokens were used up."""
        self._add(now, tokens=tokens)

    def leave(self) -> None:
        """A request has ended."""
        self._running -= 1

    def spent(self, now: float) -> Spent:
        """All of it, as it counts now."""
        self._forget(now)
        return Spent(self._running, self._requests, self._tokens)

    def seconds_until(self, now: float, *, requests: int = 0, tokens: int = 0) -> float:
        """How long until so many of the requests, or tokens, of the last minute no longer count."""
        self._forget(now)
        for slot in self._slots:
            requests, tokens = requests - slot.requests, tokens - slot.tokens
            if requests <= 0 and tokens <= 0:
                return max(0.0, slot.begins + _SLOT_SECONDS + MINUTE_SECONDS - now)
        return _MOST_RETRY_SECONDS

    def _add(self, now: float, *, requests: int = 0, tokens: int = 0) -> None:
        self._forget(now)
        if not self._slots or now >= self._slots[-1].begins + _SLOT_SECONDS:
            self._slots.append(_Slot(now))
        self._slots[-1].requests += requests
        self._slots[-1].tokens += tokens
        self._requests += requests
        self._tokens += tokens

    def _forget(self, now: float) -> None:
        oldest = now - MINUTE_SECONDS - _SLOT_SECONDS
        while self._slots and self._slots[0].begins <= oldest:
            slot = self._slots.popleft()
            self._requests -= slot.requests
            self._tokens -= slot.tokens


def entry_refusal(quota: Quota, use: Use, others: Spent, now: float) -> Refusal | None:
    """Say why a key's next request is not let in, before its prompt is looked at; None when it is.

    Args:
        quota: of the key.
        use: what it has taken here.
        others: what it has taken at other routers.
        now: seconds of the clock that `use` was told.
    """
    spent = use.spent(now).plus(others)
    limit = quota.concurrency
    if limit is not None and spent.running >= limit:
        return _refusal(f"{spent.running} requests of this key run, its limit is {limit}", _RUNNING_RETRY_SECONDS)
    limit = quota.requests_per_minute
    if limit is not None and spent.requests >= limit:
        seconds = use.seconds_until(now, requests=spent.requests - limit + 1)
        return _refusal(f"this key has sent {spent.requests} requests in a minute, its limit is {limit}", seconds)
    return token_refusal(quota, use, others, now, tokens=1)


def token_refusal(quota: Quota, use: Use, others: Spent, now: float, *, tokens: int) -> Refusal | None:
    """Say why so many tokens more are not granted; None when they are. Arguments as for `entry_refusal`."""
    limit = quota.tokens_per_minute
    if limit is None:
        return None
    if tokens > limit:
        said = f"the prompt has {tokens} tokens, more than the {limit} that this key may use in a minute"
        return Refusal(Refused.TOO_LARGE, said)
    taken = use.spent(now).tokens + others.tokens
    if taken + tokens <= limit:
        return None
    seconds = use.seconds_until(now, tokens=taken + tokens - limit)
    return _refusal(f"this key has used {taken} tokens in a minute, its limit is {limit}", seconds)


def _refusal(message: str, seconds: float) -> Refusal:
    return Refusal(Refused.OVERLOADED, message, min(max(seconds, 1.0), _MOST_RETRY_SECONDS))
