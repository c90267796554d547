"""The fleet token, which every agent call and engine request carries."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

METADATA_KEY = "authorization"
_SCHEME = "Bearer "
_MINIMUM_LENGTH = 16


def bearer(token: str) -> str:
    """Value of the authorization header or metadata entry."""
    return _SCHEME + token


def call_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """GRPC metadata of a call that carries the token."""
    return ((METADATA_KEY, bearer(token)),)


def metadata_is_valid(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Whether gRPC metadata carries the token; takes equal time for every wrong one."""
    given = next((value for key, value in metadata if key == METADATA_KEY), "")
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    return hmac.compare_digest(text.encode(), bearer(token).encode())


def create_token_file(path: Path) -> str:
    """Write a new random token, readable by its owner only, and return it."""
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(token)
    return token


def read_token_file(path: Path) -> str:
    """Read a token.

    Raises:
        ValueError: it is too short to protect anything.
        OSError: it cannot be read.
    """
    token = path.read_text().strip()
    if len(token) < _MINIMUM_LENGTH:
        raise ValueError(f"{path}: the token has {len(token)} characters, at least {_MINIMUM_LENGTH} are needed")
    return token
