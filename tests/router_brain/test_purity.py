"""The room of decisions stays pure: what it may import, and that nothing in it tells time, draws or reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from purity import check_quiet_and_small, imported

import kllm_router.scheduling

ROOM = Path(kllm_router.scheduling.__file__).parent
MODULES = sorted(ROOM.glob("*.py"))
PURE_CORE = {"kllm_core.fleet", "kllm_core.objectives", "kllm_core.timing", "kllm_core.blocks"}
STANDARD = {
    "__future__", "array", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_what_is_pure(path: Path):
    for name in imported(path):
        top = name.partition(".")[0]
        standard = top in STANDARD and top in sys.stdlib_module_names
        own = name in PURE_CORE or name.startswith("kllm_router.scheduling.")
        assert standard or own or top in {"numpy", "xxhash"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path: Path):
    check_quiet_and_small(path)
