"""The room stays pure: what it may import, and that nothing in it tells time, draws or reads."""

import ast
import sys
from pathlib import Path

import pytest

import kllm_operator.render

ROOM = Path(kllm_operator.render.__file__).parent
MODULES = sorted(ROOM.glob("*.py"))
PURE_CORE = ("kllm_core.kinds", "kllm_core.labels", "kllm_core.objectives", "kllm_core.metrics", "kllm_core")
STANDARD = {
    "__future__", "base64", "collections.abc", "copy", "dataclasses", "enum", "hashlib", "json", "math", "typing",
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
        own = name in PURE_CORE or name.startswith(("kllm_operator.render.", "kllm_core.kinds."))
        assert own or name in STANDARD, f"{path.name} imports {name}"
        assert own or name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path):
    text = path.read_text()
    called = {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}

    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
    assert len(text.splitlines()) <= 300
