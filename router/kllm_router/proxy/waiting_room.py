"""Where new requests wait while no instance serves: for a service at zero, until the first ones have started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import orjson

from kllm_router.interfaces import ApiError
from kllm_router.proxy import errors

if TYPE_CHECKING:
    from kllm_router.interfaces import EngineRequest
    from kllm_router.settings import WaitSettings

_RETRY_SECONDS = 5.0
"""Told to who is refused: a start takes longer, and who asks again then is in time for it."""


class WaitingRoom:
    """Counts who waits, and keeps their number and their size within bounds. Belongs to one event loop.

    Attributes:
        requests: that wait.
        bytes: of these, as engines will get them.
        listeners: told when somebody waits where nobody has waited; must not wait or raise.
    """

    def __init__(self, settings: WaitSettings) -> None:
        self.requests = 0
        self.bytes = 0
        self.listeners: list[Callable[[], None]] = []
        self._settings = settings

    @property
    def open(self) -> bool:
        """Whether new requests may wait at all."""
        return self._settings.seconds > 0

    @property
    def seconds(self) -> float:
        """How long each may wait."""
        return self._settings.seconds

    @contextlib.contextmanager
    def place(self, request: EngineRequest, refusal: ApiError) -> Iterator[None]:
        """A place for one request as long as the context lasts.

        Args:
            request: that waits.
            refusal: what it would be told if it did not wait.

        Raises:
            ApiError: there is no place for it.
        """
        size = len(orjson.dumps(request.body))
        settings = self._settings
        if self.requests >= settings.requests:
            raise _refused(refusal, f"{self.requests} requests wait for one, and no more may")
        if self.bytes + size > settings.bytes:
            raise _refused(
                refusal, f"with this one, requests of {self.bytes + size} bytes would wait; {settings.bytes} may"
            )
        self.requests += 1
        self.bytes += size
        try:
            if self.requests == 1:
                for listener in self.listeners:
                    listener()
            yield
        finally:
            self.requests -= 1
            self.bytes -= size

    def over(self, refusal: ApiError) -> ApiError:
        """What a request is told that has waited for so long as it may."""
        return _refused(refusal, f"none has started within {self._settings.seconds:g} seconds")


def _refused(refusal: ApiError, why: str) -> ApiError:
    error = errors.unavailable(f"{refusal.message}; {why}", code=refusal.code or "no_instance")
    error.retry_after = _RETRY_SECONDS
    return error
