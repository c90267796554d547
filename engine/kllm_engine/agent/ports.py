"""Free TCP ports for an engine."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Below Linux's default range for outgoing connections, so that none of them takes a port between choice and use.
_FIRST = 20_000
_LAST = 32_000
_ATTEMPTS = 1_000


def free_ports(count: int, *, rng: random.Random) -> list[int]:
    """Different ports on which nothing listens, on any address.

    Raises:
        OSError: too few are free.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for _ in range(_ATTEMPTS):
            if len(ports) == count:
                return ports
            candidate = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                candidate.bind(("0.0.0.0", rng.randint(_FIRST, _LAST)))
            except OSError:
                continue
            ports.append(candidate.getsockname()[1])
    raise OSError(f"no {count} free TCP ports in {_FIRST} to {_LAST}")
