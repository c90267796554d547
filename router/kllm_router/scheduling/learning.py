"""What prefill takes, learned from prompts that are done. Pure.

A request's own word, "so many new tokens on so many cached ones took so long", holds the time of whoever shared its
steps. Prompts that took longer than predicted therefore weigh less than those that were as fast or faster, and the fit
comes to lie where prompts have a step to themselves.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from kllm_core.timing import PRIOR, PrefillTiming
from kllm_router.scheduling.prefix import ASSUMED_CREDIT, PrefixMatch, Tier, TierCredit

_KEPT = 0.995
"""Weight of what was known before, per prompt: half is forgotten after 138."""
_SLOWER_WEIGHT = 0.1
_SLOWER_GAIN, _FASTER_GAIN = 0.05, 0.2
_SHAPE_WEIGHT = 0.2
"""Of each of these prompts, as which the prior's form counts: it fills in for lengths that nobody has sent."""
_SHAPE_TOKENS = (256, 1024, 4096, 16384)
_EVERY = 16
"""Prompts between two fits."""
_CREDIT_GAIN = 0.1
_LEAST_TIER_SHARE = 0.25
"""Part of a prompt that must have come from a tier for its time to tell of that tier."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class PrefillLearner:
    """Fits a + b·n + k·n·(n + 2c), and what cached tokens of slower tiers are worth.

    Args:
        prior: what is assumed before anything was learned. Later it only says how time grows with length.
        credit: the same for tiers.
    """

    def __init__(self, prior: PrefillTiming = PRIOR.prefill, credit: TierCredit = ASSUMED_CREDIT) -> None:
        self._prior, self._timing, self._credit = prior, prior, credit
        self._ratio = 1.0
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._seen = 0

    @property
    def timing(self) -> PrefillTiming:
        """As far as it is known."""
        return self._timing

    @property
    def credit(self) -> TierCredit:
        """What a cached block of each tier spares, as a share of its computation."""
        return self._credit

    @property
    def prompts(self) -> int:
        """That were learned from."""
        return self._seen

    def observe(self, new_tokens: int, cached_tokens: int, seconds: float, *, match: PrefixMatch | None = None) -> None:
        """Learn from one prompt; numbers that make no sense are left out.

        Args:
            new_tokens: computed.
            cached_tokens: found in any tier.
            seconds: from its first prefill step until its KV was complete.
            match: where the index saw the cached blocks, if it knew of them.
        """
        if not (new_tokens > 0 and cached_tokens >= 0 and math.isfinite(seconds) and seconds > 0):
            return
        slower = {} if match is None else {tier: match[tier] for tier in Tier if tier and match[tier]}
        if slower and match is not None:
            self._observe_tiers(new_tokens, cached_tokens, seconds, match=match, slower=slower)
            return
        over_prior = seconds / self._prior.seconds(new_tokens, cached_tokens)
        if not self._seen:
            self._ratio = over_prior
        gain = _SLOWER_GAIN if over_prior > self._ratio else _FASTER_GAIN
        self._ratio *= (over_prior / self._ratio) ** gain
        is_slower = seconds > self._timing.seconds(new_tokens, cached_tokens)
        weight = _SLOWER_WEIGHT if is_slower else 1.0
        row = _row(new_tokens, cached_tokens, seconds)
        self._products = _KEPT * self._products + weight * np.outer(row, row)
        self._sums = _KEPT * self._sums + weight * row
        self._seen += 1
        if self._seen % _EVERY == 0 or self._seen == 1:
            self._fit()

    def _fit(self) -> None:
        products, sums = self._products.copy(), self._sums.copy()
        for tokens in _SHAPE_TOKENS:
            row = _row(tokens, 0, self._ratio * self._prior.seconds(tokens))
            products += _SHAPE_WEIGHT * np.outer(row, row)
            sums += _SHAPE_WEIGHT * row
        self._timing = _timing(products, sums)

    def _observe_tiers(
        self, new_tokens: int, cached_tokens: int, seconds: float, *, match: PrefixMatch, slower: dict[Tier, int]
    ) -> None:
        """The time beyond computing is what loading took; it tells of the tier that most of the blocks came from."""
        tier = max(slower, key=lambda each: slower[each])
        tokens = cached_tokens * slower[tier] / match.blocks
        if tokens < _LEAST_TIER_SHARE * (new_tokens + cached_tokens):
            return
        loading = seconds - self._timing.seconds(new_tokens, cached_tokens)
        computing = self._timing.seconds(math.ceil(tokens), cached_tokens - math.ceil(tokens)) - self._timing.a
        if computing <= 0:
            return
        spared = min(1.0, max(0.0, 1.0 - loading / computing))
        before = self._credit.of(tier)
        self._credit = self._credit.replaced(tier, before + _CREDIT_GAIN * (spared - before))


def _row(new_tokens: int, cached_tokens: int, seconds: float) -> Floats:
    # Each by its relative error: a long prompt must not outweigh a hundred short ones.
    return np.array([1.0, new_tokens, new_tokens * (new_tokens + 2.0 * cached_tokens)]) / seconds


def _timing(products: Floats, sums: Floats) -> PrefillTiming:
    """The coefficients of least squares that are not negative: of all supports that solve it so, the best one."""
    best, least = np.zeros(3), math.inf
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    scaled, wanted = products / np.outer(scale, scale), sums / scale
    for support in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        part = np.array(support)
        try:
            found = np.linalg.solve(scaled[np.ix_(part, part)], wanted[part])
        except np.linalg.LinAlgError:
            continue
        # The error without its constant part: x·Px - 2·x·s, which is -x·s at a solution.
        if (found >= 0).all() and (error := -float(found @ wanted[part])) < least - 1e-12:
            best, least = np.zeros(3), error
            best[part] = found / scale[part]
    return PrefillTiming(*(float(value) for value in best))
