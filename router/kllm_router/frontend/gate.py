"""What both frontends ask before they serve a client, and tell after."""

from __future__ import annotations

from dataclasses import dataclass, field

from kllm_router.frontend.access_log import AccessLog
from kllm_router.frontend.keys import KeyRing
from kllm_router.frontend.limiter import Limiter
from kllm_router.shared.local import Alone


def _unlimited() -> Limiter:
    return Limiter(shared=Alone(), on_refusal=lambda _key: None)


@dataclass(frozen=True)
class Gate:
    """Keys, their quotas, and the access log.

    Attributes:
        keys: of clients; an empty ring needs none.
        limiter: holds keys to their quotas.
        access_log: None logs no answers.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    limiter: Limiter = field(default_factory=_unlimited)
    access_log: AccessLog | None = None
