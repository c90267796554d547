"""Errors inside the router. What a client is told is `kllm_router.interfaces.ApiError`.

RouterError
└── UpstreamError
    ├── ConnectError          no connection to the engine
    ├── ConnectionBrokenError the engine closed the connection before its answer was complete
    │   └── IdleClosedError   it was one that had been kept, and may have been closed before it was used
    ├── StalledError          no byte for longer than allowed
    ├── InstanceGoneError     its agent says that it is gone, or is gone itself
    ├── ProtocolError         not HTTP/1.1 as the router understands it
    └── ResponseTooLargeError more bytes than allowed
"""

from __future__ import annotations


class RouterError(Exception):
    """Any error of the router."""


class UpstreamError(RouterError):
    """An engine could not be asked, or its answer could not be read to its end.

    Attributes:
        unheard_seconds: from its last sign of life to this error; 0 if it failed at once.
    """

    def __init__(self, message: str, *, unheard_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.unheard_seconds = unheard_seconds


class ConnectError(UpstreamError):
    """No connection to the engine."""


class ConnectionBrokenError(UpstreamError):
    """The engine closed the connection before its answer was complete."""


class IdleClosedError(ConnectionBrokenError):
    """The engine closed a kept connection without a byte: before the request reached it, or after."""


class StalledError(UpstreamError):
    """No byte for longer than allowed."""


class InstanceGoneError(UpstreamError):
    """The instance's agent says that it is gone, or is gone itself."""


class ProtocolError(UpstreamError):
    """Not HTTP/1.1 as the router understands it."""


class ResponseTooLargeError(UpstreamError):
    """More bytes than allowed."""
