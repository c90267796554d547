"""Fixtures of the operator's tests."""

from __future__ import annotations

import pytest
from service.service_world import World


@pytest.fixture
async def world():
    async with World().running() as made:
        yield made
