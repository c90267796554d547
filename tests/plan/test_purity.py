"""The room stays pure: what it may import, and that nothing in it tells time, draws or reads."""

import ast
import sys
from pathlib import Path

import pytest

import kllm_operator.plan

ROOM = Path(kllm_operator.plan.__file__).parent
MODULES = sorted(ROOM.glob("*.py"))
PURE_CORE = {"kllm_core.fleet", "kllm_core.objectives", "kllm_core.steps", "kllm_core.timing", "kllm_core.blocks"}
IMPURE_STANDARD = {
    "asyncio",
    "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_what_is_pure(path):
    for name in imported(path):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names and top not in IMPURE_STANDARD
        own = name in PURE_CORE or name.startswith("kllm_operator.plan.")
        assert standard or own or top in {"numpy", "xxhash"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path):
    text = path.read_text()
    called = {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}

    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
    assert len(text.splitlines()) <= 300
