"""The fleet token does not reach the engine's log."""

from __future__ import annotations

import logging

import pytest

from kllm_engine.sglang.redaction import SecretFilter


@pytest.mark.parametrize(
    "message",
    [
        "server_args={'port': 1, 'api_key': 'tok-en_1', 'admin_api_key': 'tok-en_1', 'host': 'h'}",
        "ServerArgs(port=1, api_key='tok-en_1', host='h')",
    ],
)
def test_api_keys_are_masked_and_the_rest_stays(message):
    record = logging.LogRecord("x", logging.INFO, "f", 1, message, (), None)
    assert SecretFilter().filter(record)
    assert "tok-en_1" not in record.getMessage()
    assert "'h'" in record.getMessage()
