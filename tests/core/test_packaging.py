"""Which room may import what."""

import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "sglang", "transformers", "triton"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import importlib, pkgutil
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print("imported")
"""


def test_the_standard_library_keeps_its_operator_module():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert Path(operator.__file__).is_relative_to(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize("package", ["kllm_core", "kllm_operator", "kllm_router", "kllm"])
def test_control_plane_router_and_command_line_import_without_torch_and_sglang(package):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, package], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout.endswith("imported\n"), done.stderr
