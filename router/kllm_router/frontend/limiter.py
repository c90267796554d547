"""Lets requests of keys in, as far as their quotas go; what other routers let in counts too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kllm_router.frontend.keys import ApiKey
from kllm_router.interfaces import ApiError
from kllm_router.proxy import errors
from kllm_router.scheduling.choices import Refusal, Refused
from kllm_router.scheduling.quota import NOTHING, Spent, Use, entry_refusal, token_refusal

if TYPE_CHECKING:
    from kllm_router.interfaces import SharedLoad


class Ticket:
    """One request that was let in."""

    __slots__ = ("_key", "_limiter", "_use")

    def __init__(self, limiter: Limiter, key: ApiKey, use: Use | None) -> None:
        self._limiter = limiter
        self._key = key
        self._use = use

    @property
    def key(self) -> str:
        """Name of its key; empty where none is needed."""
        return self._key.name

    def take_prompt(self, tokens: int) -> None:
        """Count the prompt.

        Raises:
            ApiError: 429, or 400 for a prompt that the key may never send.
        """
        if self._use is None:
            return
        limiter, now = self._limiter, self._limiter.clock()
        refusal = token_refusal(self._key.quota, self._use, limiter.others(self.key, now), now, tokens=tokens)
        limiter.check(self.key, refusal)
        self._use.take(tokens, now)

    def leave(self, output_tokens: int) -> None:
        """The request has ended, with so many tokens of output."""
        use, self._use = self._use, None
        if use is not None:
            use.take(output_tokens, self._limiter.clock())
            use.leave()


class Limiter:
    """Counts what keys take.

    Args:
        shared: what other routers let in.
        on_refusal: told the name of every key that is refused something.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        shared: SharedLoad,
        on_refusal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._shared = shared
        self._on_refusal = on_refusal
        self._uses: dict[str, Use] = {}

    def enter(self, key: ApiKey) -> Ticket:
        """Let a request in.

        Raises:
            ApiError: 429, the key's quota is used up.
        """
        if not key.quota.bounds:
            return Ticket(self, key, None)
        now = self.clock()
        use = self._uses.setdefault(key.name, Use())
        self.check(key.name, entry_refusal(key.quota, use, self.others(key.name, now), now))
        use.enter(now)
        return Ticket(self, key, use)

    def spent(self) -> dict[str, Spent]:
        """What keys with a quota have taken here, of those that have taken anything."""
        now = self.clock()
        spent = {name: use.spent(now) for name, use in self._uses.items()}
        for name, told in spent.items():
            if told == NOTHING:
                del self._uses[name]
        return {name: told for name, told in spent.items() if told != NOTHING}

    # --- for tickets

    def others(self, name: str, now: float) -> Spent:
        """What a key has taken at other routers."""
        return self._shared.spent(name, now)

    def check(self, name: str, refusal: Refusal | None) -> None:
        """Refuse what must be refused.

        Raises:
            ApiError: there is a refusal.
        """
        if refusal is not None:
            self._on_refusal(name)
            raise _error(refusal)


def _error(refusal: Refusal) -> ApiError:
    if refusal.reason is Refused.TOO_LARGE:  # another try would fail as well
        return ApiError(400, refusal.message, code="request_too_large")
    return errors.rate_limited(refusal.message, retry_after=refusal.retry_after_seconds)
