from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_agent.harness import TOKEN

PYTHON = [sys.executable, "-m", "kllm_engine.main"]


def _agent_flags(run_dir: Path, **changes: str) -> list[str]:
    (run_dir / "token").write_text(TOKEN)
    flags = {
        "instance-id": "a",
        "service": "chat",
        "role": "prefill",
        "model": "/m",
        "model-name": "m",
        "token-file": str(run_dir / "token"),
        "run-dir": str(run_dir),
    } | changes
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine-args": "[1]"}, "--engine-args must be a JSON object"),
        ({"engine-args": "{"}, "--engine-args is not JSON"),
        ({"engine-args": '{"port": 1}'}, "port"),
        ({"token-file": "/nowhere"}, "--token-file"),
        ({"run-dir": "/nowhere"}, "--run-dir /nowhere is not a directory"),
        ({"instance-id": "x" * 120}, "107 bytes"),
        ({"page-size": "0"}, "--page-size"),
        ({"kv-type": "FP3"}, "FP3"),
        ({"listen": "300.0.0.1:0"}, "--listen"),
        ({"pace": "decode=0.1x"}, "--pace: decode: unknown unit 'x'"),
        ({"pace": "/nowhere.json"}, "--pace"),
        ({"role": "both"}, "--role"),
    ],
)
def test_wrong_flags_exit_with_2_and_name_the_flag(run_dir: Path, changes: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [*PYTHON, "agent", *_agent_flags(run_dir, **changes)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert TOKEN not in done.stderr


def test_the_agent_imports_neither_torch_nor_sglang_nor_transformers() -> None:
    code = (
        "import sys, kllm_engine.main, kllm_engine.agent.command, kllm_engine.agent.runtime\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'sglang', 'transformers', 'triton'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_the_zygote_starts_no_thread_and_imports_no_grpc_on_its_way_to_the_serve_loop() -> None:
    code = (
        "import sys, kllm_engine.main as m; m._parser(); import kllm_engine.start.zygote; print('grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
