from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router runs on uvloop, whose transports differ from asyncio's in details that matter here."""
    return {"uvloop": uvloop.new_event_loop}
