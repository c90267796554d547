"""Where Redis is: a URL, or a file that holds one, such as a mounted Secret."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kllm_router.shared.exceptions import AddressError

_FORM = "redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE]"
_PORT = 6379
_MOST_BYTES = 4096
"""Of a file; a URL is shorter."""


@dataclass(frozen=True)
class RedisAddress:
    """Where Redis is and as whom it is asked. Its text leaves out who.

    Attributes:
        username: empty is Redis' default user.
        password: empty asks without one.
        tls: whether the connection is encrypted, and the server's certificate and name checked.
    """

    host: str
    port: int = _PORT
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.database}"


def parse_address(url: str) -> RedisAddress:
    """Read a URL; user and password are percent-encoded.

    Raises:
        AddressError: it has another form.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _PORT
    except ValueError:
        # The text of the error may quote the password.
        raise AddressError(f"the URL is not {_FORM}") from None
    if parts.scheme not in {"redis", "rediss"} or not parts.hostname:
        raise AddressError(f"the URL is not {_FORM}")
    if parts.query or parts.fragment:
        raise AddressError(f"the URL has more than {_FORM}; a ? or # in a password is written as %3F or %23")
    database = parts.path.removeprefix("/") or "0"
    if not (database.isascii() and database.isdigit()):
        raise AddressError("the URL's path must be the number of a database")
    return RedisAddress(
        host=parts.hostname,
        port=port,
        database=int(database),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme == "rediss",
    )


def read_address(source: RedisAddress | Path) -> RedisAddress:
    """The address; a file is read anew, since Secrets change and may come later than the router.

    Raises:
        AddressError: the file cannot be read, or holds something else.
    """
    if isinstance(source, RedisAddress):
        return source
    try:
        with source.open("rb") as file:
            text = file.read(_MOST_BYTES)
        return parse_address(text.decode())
    except OSError as error:
        raise AddressError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise AddressError(f"{source}: not text") from None
    except AddressError as error:
        raise AddressError(f"{source}: {error}") from None
