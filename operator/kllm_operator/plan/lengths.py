"""How much the lengths of single prompts vary. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_operator.plan.demand import Totals

_REMEMBERED = 2000.0
"""Requests that count: enough that the longest in a hundred come twenty times."""
_LEAST = 20.0
"""Requests below which nothing is said."""


@dataclass(frozen=True)
class Lengths:
    """Sums over the last requests, older ones with less weight.

    Means of few requests lie far apart where prompts of one kind come in crowds, though single prompts are alike: their
    noise says what queues there will be, and not how long a prompt is.
    """

    requests: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def seen(self, before: Totals, after: Totals) -> Lengths:
        """With what came between two totals; without squares nothing is learned."""
        requests, squares = after.arrivals - before.arrivals, after.prompt_token_squares - before.prompt_token_squares
        if requests <= 0 or squares <= 0:
            return self
        left = max(0.0, 1 - requests / _REMEMBERED)
        tokens = after.prompt_tokens - before.prompt_tokens
        return Lengths(left * self.requests + requests, left * self.tokens + tokens, left * self.squares + squares)

    @property
    def variation(self) -> float | None:
        """Squared coefficient of variation of one prompt's length; None while too few were seen."""
        if self.requests < _LEAST or self.tokens <= 0:
            return None
        return max(0.0, self.squares * self.requests / (self.tokens * self.tokens) - 1)
