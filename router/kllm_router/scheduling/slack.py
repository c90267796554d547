"""Who is let in when there is more to do than can be done in time: by slack, and by fair shares between keys. Pure.

Slack is the objective less the predicted time to first token. While everybody gets what they ask for, a request is let
in whose slack is not negative; one that would be late is refused at once, when its client can still go elsewhere, and
the queue stays short enough for those that are in. When keys ask for more than there is, each has the share that
max-min fairness gives it: one that is over its share must have slack to spare, one that is under it may be late. What
a key has had fades, and the longer a key gets nothing but refusals, the later its next request may be: none starves.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kllm_router.scheduling.choices import Refusal, Refused

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
_LEVEL_SECONDS = 0.5
"""Between two looks at who asks for how much."""
_AGEING_SECONDS = 10.0
"""For which a key is refused until its requests may wait one objective longer."""
_LONG_SHARE = 0.5
"""Part of the objective that a prompt may wait which by itself takes longer than all of it."""


@dataclass(frozen=True)
class SlackSettings:
    """When a request is late, and for whom it may be.

    Attributes:
        ttft_seconds: the objective for the time to first token; None lets everybody in.
        prefill_share: part of what the handover leaves of it that may be predicted until the prompt is computed; the
            rest is for what a prediction can miss.
        window_seconds: within which what a key asked for and had fades to 1/e.
        max_keys: that are remembered; beyond, those that asked longest ago are forgotten.
    """

    ttft_seconds: float | None = None
    prefill_share: float = 0.75
    window_seconds: float = 30.0
    max_keys: int = 10_000


@dataclass(slots=True)
class _Account:
    """Seconds of work of one key, both fading.

    Attributes:
        at: when they were true.
        refused_since: since when it was only refused; None: its last request was let in.
    """

    asked: float = 0.0
    had: float = 0.0
    at: float = 0.0
    refused_since: float | None = None


class SlackAdmission:
    """Decides for each request as it comes. `now` is monotonic seconds and never goes back."""

    def __init__(self, settings: SlackSettings = SlackSettings()) -> None:
        self._settings = settings
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._level = self._most_used = math.inf
        self._looked_at = -math.inf

    def decide(
        self,
        key: str,
        *,
        own_seconds: float,
        wait_seconds: float,
        handover_seconds: float = 0.0,
        instances: float,
        now: float,
    ) -> Refusal | None:
        """Say why a request is refused, or None when it is let in, and count it.

        Args:
            key: of the client.
            own_seconds: to compute its prompt.
            wait_seconds: until that begins.
            handover_seconds: from then on until the first token.
            instances: that compute prompts, as a number of whole ones.
            now: monotonic seconds.
        """
        objective = self._settings.ttft_seconds
        if objective is None:
            return None
        account = self._account(key, now)
        account.asked += own_seconds
        if now - self._looked_at >= _LEVEL_SECONDS:
            self._look(instances, now)
        target = max(0.0, objective - handover_seconds) * self._settings.prefill_share
        allowed = self._allowed(account, own_seconds, target)
        if account.refused_since is not None:
            allowed += objective * (now - account.refused_since) / _AGEING_SECONDS
        if wait_seconds > allowed:
            account.refused_since = now if account.refused_since is None else account.refused_since
            retry = min(max(wait_seconds - allowed, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
            expected = wait_seconds + own_seconds + handover_seconds
            message = f"the first token is expected after {expected:.1f} s, and the objective is {objective:g} s"
            return Refusal(Refused.OVERLOADED, message, retry)
        account.had += own_seconds
        account.refused_since = None
        return None

    def share(self, key: str) -> float:
        """What a key has had, over its fair share; above 1 it had more. 0 while there is enough for all."""
        account = self._accounts.get(key)
        return 0.0 if account is None or math.isinf(self._level) else account.had / self._level

    def _allowed(self, account: _Account, own_seconds: float, target: float) -> float:
        """How long a request may wait."""
        wait = target - own_seconds if own_seconds < target else target * _LONG_SHARE
        if math.isinf(self._level):
            return wait
        used = account.had / self._level
        if used > 1.0:
            return wait - target * (used - 1.0)
        # Only beside somebody who had more is a key that had little owed anything.
        return wait + target * max(0.0, 1.0 - used / max(self._most_used, used, 1e-9))

    def _account(self, key: str, now: float) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(at=now)
            if len(self._accounts) > self._settings.max_keys:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(key)
        self._fade(account, now)
        return account

    def _fade(self, account: _Account, now: float) -> None:
        left = math.exp(-(now - account.at) / self._settings.window_seconds)
        account.asked, account.had, account.at = account.asked * left, account.had * left, now

    def _look(self, instances: float, now: float) -> None:
        self._looked_at = now
        for account in self._accounts.values():
            self._fade(account, now)
        room = instances * self._settings.window_seconds
        self._level = fair_level([account.asked for account in self._accounts.values()], room)
        most = max((account.had for account in self._accounts.values()), default=0.0)
        self._most_used = math.inf if math.isinf(self._level) else most / self._level


def fair_level(asked: Sequence[float], room: float) -> float:
    """Up to which each gets what it asks for, so that all together get `room`; infinite when there is enough."""
    if sum(asked) <= room:
        return math.inf
    left, level = room, 0.0
    for place, amount in enumerate(sorted(asked)):
        level = left / (len(asked) - place)
        if amount > level:
            break
        left -= amount
    return level
