"""What decides in an engine has no files, clock, randomness or environment."""

import sys
from pathlib import Path

import pytest
from purity import check_quiet_and_small, imported

import kllm_engine.policy

_PACKAGE = Path(kllm_engine.policy.__file__).parent
_ALLOWED = {"__future__", "collections", "dataclasses", "enum", "math", "typing", "kllm_engine"}


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_a_module_is_pure(path):
    for name in imported(path):
        assert name.split(".")[0] in _ALLOWED & (sys.stdlib_module_names | {"kllm_engine"})
        assert name.split(".")[0] != "kllm_engine" or name.startswith("kllm_engine.policy")
    check_quiet_and_small(path)
