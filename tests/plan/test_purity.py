"""The room stays pure: what it may import, and that nothing in it tells time, draws or reads."""

import sys
from pathlib import Path

import pytest
from purity import check_quiet_and_small, imported

import kllm_operator.plan

ROOM = Path(kllm_operator.plan.__file__).parent
MODULES = sorted(ROOM.glob("*.py"))
PURE_CORE = {"kllm_core.fleet", "kllm_core.objectives", "kllm_core.steps", "kllm_core.timing", "kllm_core.blocks"}
IMPURE_STANDARD = {
    "asyncio",
    "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_what_is_pure(path):
    for name in imported(path):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names and top not in IMPURE_STANDARD
        own = name in PURE_CORE or name.startswith("kllm_operator.plan.")
        assert standard or own or top in {"numpy", "xxhash"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path):
    check_quiet_and_small(path)
