"""The room stays pure: what it may import, and that nothing in it tells time, draws or reads."""

import sys
from pathlib import Path

import pytest
from purity import check_quiet_and_small, imported

import kllm_operator.render

ROOM = Path(kllm_operator.render.__file__).parent
MODULES = sorted(ROOM.glob("*.py"))
PURE_CORE = ("kllm_core.kinds", "kllm_core.labels", "kllm_core.objectives", "kllm_core.metrics", "kllm_core")
STANDARD = {
    "__future__", "base64", "collections.abc", "copy", "dataclasses", "enum", "hashlib", "json", "math", "typing",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_what_is_pure(path):
    for name in imported(path):
        own = name in PURE_CORE or name.startswith(("kllm_operator.render.", "kllm_core.kinds."))
        assert own or name in STANDARD, f"{path.name} imports {name}"
        assert own or name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_opens_and_prints_nothing_and_holds_one_noun(path):
    check_quiet_and_small(path)
