"""What the API server may answer instead.

KubeError
├── NotFoundError       there is no such object, or no such kind
├── ConflictError       a precondition (uid, resourceVersion) does not hold, or the object changed in between
│   └── AlreadyExistsError  an object of this name is there
├── GoneError           what was asked for is too old to be told of
├── InvalidError        the object breaks a rule of its kind; the message names the field
├── ForbiddenError      the operator may not do that
├── TooManyError        the server asks to come again later
├── UnreachableError    no answer, or one of a server that is in trouble; a write may have been carried out or not
└── NotLeadingError     another replica leads, so that nothing was sent
"""

from __future__ import annotations

import json
from typing import Any


class KubeError(Exception):
    """Base of all of them; its text is for people.

    Attributes:
        reason: CamelCase, as the server gave it.
        status: of the HTTP response; 0 without one.
    """

    def __init__(self, message: str, *, reason: str = "", status: int = 0) -> None:
        self.reason = reason or type(self).__name__.removesuffix("Error")
        self.status = status
        super().__init__(message)


class NotFoundError(KubeError):
    """There is no such object."""


class ConflictError(KubeError):
    """A precondition does not hold."""


class AlreadyExistsError(ConflictError):
    """An object of this name is there."""


class GoneError(KubeError):
    """What was asked for is too old to be told of."""


class InvalidError(KubeError):
    """The object breaks a rule of its kind."""


class ForbiddenError(KubeError):
    """The operator may not do that."""


class TooManyError(KubeError):
    """The server asks to come again later.

    Attributes:
        retry_after: seconds; None if the server did not say.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, reason: str = "", status: int = 429) -> None:
        self.retry_after = retry_after
        super().__init__(message, reason=reason, status=status)


class UnreachableError(KubeError):
    """No answer, or one of a server that is in trouble."""


class NotLeadingError(KubeError):
    """Another replica leads."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
}
_MOST_CHARACTERS = 1000


def error_of(status: int, body: bytes, *, retry_after: str | None = None) -> KubeError:
    """The error that a response stands for.

    Args:
        status: of the response, 400 or more.
        body: a Status object, as far as it is the server that answers and not something in front of it.
        retry_after: the header of that name.
    """
    told = _status_object(body)
    reason = str(told.get("reason") or "")
    message = str(told.get("message") or "").strip() or f"the API server answered {status}"
    message = message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]}..."
    if status == 429:
        return TooManyError(message, retry_after=_seconds(retry_after), reason=reason)
    if status == 500 and message.startswith("failed to create typed patch object"):
        # So the server answers to the apply of a field that the kind does not have.
        return InvalidError(message, reason=reason, status=status)
    if status >= 500:
        return UnreachableError(message, reason=reason, status=status)
    if status == 422 and _concerns_uid(told):
        # To the server a patch with another uid is an attempt to change it; here it is a precondition.
        return ConflictError(message, reason="Conflict", status=status)
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExistsError(message, reason=reason, status=status)
    return _BY_STATUS.get(status, KubeError)(message, reason=reason, status=status)


def _status_object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) and told.get("kind") == "Status" else {}


def _concerns_uid(told: dict[str, Any]) -> bool:
    causes = (told.get("details") or {}).get("causes") or ()
    return any(each.get("field") == "metadata.uid" for each in causes)


def _seconds(header: str | None) -> float | None:
    # The other form of the header, a date, is not used by the API server.
    return float(header) if header is not None and header.isdecimal() else None
