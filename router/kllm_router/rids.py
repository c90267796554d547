"""Request ids."""

from __future__ import annotations

import secrets


def new_rid() -> str:
    """An id of fixed width, so that none is another one's beginning: engines abort by prefix."""
    return secrets.token_hex(16)
