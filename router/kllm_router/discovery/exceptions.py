"""What can go wrong on the way to the API server.

DiscoveryError
├── AccessError      it is not known how to reach the API server, or as whom
└── ApiServerError   it did not answer, or not as needed
    └── ExpiredError it no longer knows the state that a list or watch was to go on from
"""

from __future__ import annotations


class DiscoveryError(Exception):
    """Instances could not be found out; the message says why."""


class AccessError(DiscoveryError):
    """It is not known how to reach the API server, or as whom; the message names the file and the field."""


class ApiServerError(DiscoveryError):
    """The API server did not answer, or not as needed.

    Args:
        message: for people.
        reason: one of a few words, for metrics.
        retry_after: seconds that it asks to wait; None when it asks for nothing.
    """

    def __init__(self, message: str, *, reason: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class ExpiredError(ApiServerError):
    """A list or a watch cannot go on from where it was; it must begin again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="expired")
