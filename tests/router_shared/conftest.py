"""A Redis of one's own."""

from __future__ import annotations

import shutil

import pytest
from router_shared.redis_server import RedisServer


@pytest.fixture
def make_redis(tmp_path):
    """Servers that end with the test; they are not started yet."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    made = []

    def make(**values):
        made.append(RedisServer(tmp_path, **values))
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def redis(make_redis):
    """A server that answers."""
    server = make_redis()
    server.start()
    return server
