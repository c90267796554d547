"""Keys of clients: read from a file, kept as hashes, read again when the file changes."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from kllm_router.frontend.files import changes
from kllm_router.scheduling.quota import NO_QUOTA, Quota

_SCHEME = "bearer"
_HASHED = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrency": "concurrency",
}
_MOST = 1_000_000_000
_MOST_KEYS = 10_000
_MOST_BYTES = 4 * 1024 * 1024
_RELOAD_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class KeysError(ValueError):
    """Keys that cannot be used; the message names file and line, and never a key."""


@dataclass(frozen=True)
class ApiKey:
    """One key.

    Attributes:
        name: what logs, metrics and other routers call it; never the key itself.
        digest: SHA-256 of the key.
        quota: what it may take.
    """

    name: str
    digest: bytes
    quota: Quota = NO_QUOTA


EVERYONE = ApiKey("", b"")
"""Whoever comes where no key is needed."""


class KeyRing:
    """The keys that are valid now. An empty one lets everyone in."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys: dict[bytes, ApiKey] = {}
        self.replace(keys)

    @property
    def needed(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    def replace(self, keys: Iterable[ApiKey]) -> bool:
        """From now on these are valid, and no others; say whether they are other ones than before."""
        before, self._keys = self._keys, {key.digest: key for key in keys}
        return self._keys != before

    def find(self, authorization: str) -> ApiKey | None:
        """The key in an Authorization header; None if it is not valid. `EVERYONE` where none is needed."""
        if not self._keys:
            return EVERYONE
        key = bearer_of(authorization)
        # What is looked up is a hash, so that the time it takes says nothing of the keys.
        return None if key is None else self._keys.get(digest(key))


def bearer_of(authorization: str) -> str | None:
    """What is after Bearer in an Authorization header; None of any other."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == _SCHEME else None


def digest(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path) -> list[ApiKey]:
    """Keys of a file; see `parse_keys`.

    Raises:
        KeysError: it cannot be read, or not all of it is understood.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES:
        raise KeysError(f"{path} is larger than {_MOST_BYTES} bytes")
    try:
        return parse_keys(text)
    except KeysError as error:
        raise KeysError(f"{path}{error}") from None


def parse_keys(text: str) -> list[ApiKey]:
    """Read one key a line: the key or `sha256:` and its hash in hex, then words `name=` and limits.

    Raises:
        KeysError: a line is not of this form, two have the same key or name, or there is none.
    """
    keys: list[ApiKey] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _parsed(words)
        except ValueError as error:
            raise KeysError(f", line {number}: {error}") from None
        if key.digest in digests or key.name in names:
            raise KeysError(f", line {number}: an earlier line has the same {'name' if key.name in names else 'key'}")
        digests.add(key.digest)
        names.add(key.name)
        keys.append(key)
        if len(keys) > _MOST_KEYS:
            raise KeysError(f", line {number}: more than {_MOST_KEYS} keys")
    if not keys:
        raise KeysError(" holds no key; leave the flag out to need none")
    return keys


def _parsed(words: list[str]) -> ApiKey:
    first, *rest = words
    if first.startswith(_HASHED):
        told = first.removeprefix(_HASHED).lower()
        if not _DIGEST.fullmatch(told):
            raise ValueError("after sha256: there must be 64 hex digits")
        hashed = bytes.fromhex(told)
    else:
        hashed = digest(first)
    name, limits = hashed.hex()[:12], {}
    for word in rest:
        field, separator, value = word.partition("=")
        if not separator or field not in {"name", *_LIMITS}:
            raise ValueError(f"after the key there may be name= and {', '.join(f'{each}=' for each in _LIMITS)}")
        if field == "name":
            if not _NAME.fullmatch(value):
                raise ValueError("name= must be 1 to 64 letters, digits, dots, dashes and underscores")
            name = value
        elif not (value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST):
            raise ValueError(f"{field}= must be a whole number from 1 to {_MOST}")
        else:
            limits[_LIMITS[field]] = int(value)
    return ApiKey(name, hashed, Quota(**limits))


async def follow_keys(
    path: Path, ring: KeyRing, *, on_reload: Callable[[bool], None], seconds: float = _RELOAD_SECONDS
) -> None:
    """Take over the file's keys whenever it changes, until cancelled. What cannot be read changes nothing.

    Args:
        path: the file, or where a Secret is mounted.
        ring: gets the keys.
        on_reload: told of every change, and whether it could be used.
        seconds: between two looks at the file.
    """
    for changed in changes(path):
        if changed:
            try:
                keys = await asyncio.to_thread(read_keys, path)
            except KeysError as error:
                _log.error("the keys stay as they were", reason=str(error))
                on_reload(False)
            else:
                if ring.replace(keys):
                    _log.info("keys were read anew", keys=len(keys))
                    on_reload(True)
        await asyncio.sleep(seconds)
