"""What can go wrong with a model.

ModelError                      the cache or the link cannot be used
├── ModelUnavailableError       it cannot be had from here: offline, unknown, no permission
│   ├── WrongAddressError       there is no such kind of address
│   ├── ModelNotFoundError      where the address points to there is none
│   ├── AccessDeniedError       it is there for others
│   └── HubUnreachableError     the hub does not answer, or not as a hub: another time it may
├── DiskFullError               there is no room for it
└── ModelUnusableError          it is there, but incomplete or of the wrong kind
"""

from __future__ import annotations

from typing import ClassVar


class ModelError(Exception):
    """A model could not be made available; the message says what to do.

    Attributes:
        reason: one word in CamelCase for programs.
        exit_code: of the program that wanted the model.
    """

    reason: ClassVar[str] = "CacheUnusable"
    exit_code: ClassVar[int] = 1


class ModelUnavailableError(ModelError):
    """It cannot be had from here: offline, unknown, or no permission."""

    reason = "ModelNotFound"
    exit_code = 3


class WrongAddressError(ModelUnavailableError):
    """There is no such kind of address."""

    reason = "WrongAddress"
    exit_code = 2


class ModelNotFoundError(ModelUnavailableError):
    """Where the address points to there is no model."""


class AccessDeniedError(ModelUnavailableError):
    """It is there for others: gated, or private."""

    reason = "ModelAccessDenied"


class HubUnreachableError(ModelUnavailableError):
    """The hub does not answer, or not as a hub does; another time it may."""

    reason = "HubUnreachable"
    exit_code = 4


class DiskFullError(ModelError):
    """There is no room for it."""

    reason = "DiskFull"
    exit_code = 5


class ModelUnusableError(ModelError):
    """It is there, but incomplete or of the wrong kind."""

    reason = "ModelUnusable"
    exit_code = 6
