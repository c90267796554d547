"""What one router has on an instance, so that routers can count each other's requests as their own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Share(NamedTuple):
    """What a router, or several, have sent to one instance.

    Attributes:
        in_flight: requests that it has.
        unreported_requests: those that its own load, as that router last heard it, cannot contain yet.
        unreported_tokens: of these: uncached prompt tokens on a prefill instance, KV tokens on a decode instance.
    """

    in_flight: int = 0
    unreported_requests: int = 0
    unreported_tokens: int = 0

    def plus(self, other: Share) -> Share:
        """Both together."""
        return Share(
            self.in_flight + other.in_flight,
            self.unreported_requests + other.unreported_requests,
            self.unreported_tokens + other.unreported_tokens,
        )


NO_SHARE = Share()


def summed(shares: Iterable[Mapping[str, Share]]) -> dict[str, Share]:
    """Shares of several routers, each by instance id, as one of all."""
    total: dict[str, Share] = {}
    for each in shares:
        for instance_id, share in each.items():
            total[instance_id] = total.get(instance_id, NO_SHARE).plus(share)
    return total
