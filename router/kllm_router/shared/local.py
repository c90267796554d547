"""One router that has nobody to share with."""

from __future__ import annotations

from typing import Any

from kllm_router.scheduling.quota import NOTHING, Spent
from kllm_router.scheduling.share import NO_SHARE, Share


class Alone:
    """Implements `kllm_router.interfaces.SharedLoad`: there are no others."""

    def of(self, instance_id: str, now: float) -> Share:  # noqa: ARG002
        """See `SharedLoad`."""
        return NO_SHARE

    def spent(self, key: str, now: float) -> Spent:  # noqa: ARG002
        """See `SharedLoad`."""
        return NOTHING

    def status(self) -> dict[str, Any] | None:
        """See `SharedLoad`."""
        return None
