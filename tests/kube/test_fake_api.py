"""The API server in memory keeps the contract that a real one keeps."""

from __future__ import annotations

import pytest
from kube import api_contract
from kube.fake_api import FakeApi

globals().update({name: test for name, test in vars(api_contract).items() if name.startswith("test_")})


@pytest.fixture
def api():
    return FakeApi(restricted=False)


@pytest.fixture
def namespace():
    return "default"
