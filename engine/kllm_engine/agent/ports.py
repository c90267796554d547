"""Free TCP ports for an engine."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack

# Below Linux's default range for outgoing connections, so that none of them takes a port between choice and use.
_FIRST = 20_000
_LAST = 32_000
_ATTEMPTS = 1_000


def free_ports(count: int, *, rng: random.Random, but: Collection[int] = ()) -> list[int]:
    """Different ports on which nothing listens, on any address, and none of those in `but`.

    Raises:
        OSError: too few are free.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for _ in range(_ATTEMPTS):
            if len(ports) == count:
                return ports
            wanted = rng.randint(_FIRST, _LAST)
            if wanted in but:
                continue
            candidate = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                candidate.bind(("0.0.0.0", wanted))
            except OSError:
                continue
            ports.append(wanted)
    raise OSError(f"no {count} free TCP ports in {_FIRST} to {_LAST}")
