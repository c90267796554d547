"""What can go wrong with a model.

ModelError
├── ModelUnavailableError  it cannot be had from here: offline, unknown, no permission
└── ModelUnusableError     it is there, but incomplete or of the wrong kind
"""

from __future__ import annotations


class ModelError(Exception):
    """A model could not be made available; the message says what to do."""


class ModelUnavailableError(ModelError):
    """It cannot be had from here: offline, unknown, or no permission."""


class ModelUnusableError(ModelError):
    """It is there, but incomplete or of the wrong kind."""
