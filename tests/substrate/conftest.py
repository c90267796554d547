"""Fixtures of the substrates' tests."""

from __future__ import annotations

import os
import sys

import pytest
from substrate import drivers


@pytest.fixture
async def driver(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    async with drivers.pods(tmp_path) as driven:
        yield driven
