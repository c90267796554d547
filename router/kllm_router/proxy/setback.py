"""A failure of an instance that another instance may make good."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from kllm_router.exceptions import (
    ConnectError,
    ConnectionBrokenError,
    IdleClosedError,
    InstanceGoneError,
    ProtocolError,
    ResponseTooLargeError,
    StalledError,
    UpstreamError,
)

if TYPE_CHECKING:
    from kllm_router.interfaces import ApiError, Endpoint

_BETWEEN = re.compile(r"transfer|handshake|bootstrap|prefill instance|no decode instance", re.IGNORECASE)


class Cause(enum.StrEnum):
    """What happened; a metric's label."""

    REFUSED = "refused"
    """No connection."""
    RESET = "reset"
    """The connection ended before the answer."""
    SILENT = "silent"
    """No byte, from an instance that seems to live."""
    GONE = "gone"
    """Its agent says so, or is gone itself."""
    TIMEOUT = "timeout"
    """A stage took longer than allowed."""
    PROTOCOL = "protocol"
    """The answer was not understood."""
    ENGINE = "engine_error"
    """The engine said that it failed."""


_CAUSES = {
    ConnectError: Cause.REFUSED,
    ConnectionBrokenError: Cause.RESET,
    IdleClosedError: Cause.RESET,
    StalledError: Cause.SILENT,
    InstanceGoneError: Cause.GONE,
    ProtocolError: Cause.PROTOCOL,
    ResponseTooLargeError: Cause.PROTOCOL,
}


class Setback(Exception):  # noqa: N818  it is no error of the program and no end of the request
    """An attempt has failed, and another one may not.

    Attributes:
        error: what the client is told if there is no other attempt.
        endpoint: the instance that failed.
        cause: what happened.
        certain: the instance cannot serve this request; otherwise another try with it may help, if there is no other.
        between: its partner may be the one to blame.
        room_free: the decode instance was never asked, so that the parked KV can go to another one.
        unheard_seconds: how long before this the instance gave its last sign of life.
    """

    def __init__(
        self,
        error: ApiError,
        endpoint: Endpoint,
        cause: Cause,
        *,
        certain: bool = True,
        between: bool = False,
        room_free: bool = False,
        unheard_seconds: float = 0.0,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.endpoint = endpoint
        self.cause = cause
        self.certain = certain and not between
        self.between = between
        self.room_free = room_free
        self.unheard_seconds = unheard_seconds


def cause_of(error: UpstreamError) -> Cause:
    """The cause that an error of a connection stands for."""
    return _CAUSES.get(type(error), Cause.PROTOCOL)


def is_between(message: str) -> bool:
    """Whether an engine's words are about its partner or about what lies between them."""
    return _BETWEEN.search(message) is not None
