"""What a test of a pure room looks for in a module."""

import ast
from collections.abc import Iterator
from pathlib import Path


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that it imports, none of them relative."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module


def check_quiet_and_small(path: Path) -> None:
    """It opens and prints nothing, and holds one noun."""
    text = path.read_text()
    called = {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}

    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
    assert len(text.splitlines()) <= 300
