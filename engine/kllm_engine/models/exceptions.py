"""What can go wrong with a model.

ModelError
├── ModelUnavailable   it cannot be had from here: offline, unknown, no permission
└── ModelUnusable      it is there, but incomplete or of the wrong kind
"""

from __future__ import annotations


class ModelError(Exception):
    """A model could not be made available; the message says what to do."""


class ModelUnavailable(ModelError):
    """It cannot be had from here: offline, unknown, or no permission."""


class ModelUnusable(ModelError):
    """It is there, but incomplete or of the wrong kind."""
