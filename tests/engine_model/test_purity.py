"""The model stays pure: what it may import, and that nothing in it tells time, draws or reads."""

from pathlib import Path

import pytest
from purity import check_quiet_and_small, imported

import kllm_core.engine_model

MODULES = sorted(Path(kllm_core.engine_model.__file__).parent.glob("*.py"))
STANDARD = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "heapq",
    "itertools",
    "math",
    "typing",
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_what_is_pure(path):
    own = {name for name in imported(path) if name not in STANDARD}
    assert all(
        name.startswith("kllm_core.engine_model.") or name in {"kllm_core.timing", "kllm_core.fleet"} for name in own
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path):
    check_quiet_and_small(path)
