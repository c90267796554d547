from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from engine_agent.harness import TOKEN, model_folder

from kllm_core.objectives import Role
from kllm_engine.agent.command import add_flags, settings_of

PYTHON = [sys.executable, "-m", "kllm_engine.main"]


def _agent_flags(run_dir: Path, **changes: str | None) -> list[str]:
    (run_dir / "token").write_text(TOKEN)
    flags = {
        "instance-id": "a",
        "service": "chat",
        "role": "prefill",
        "model": str(model_folder(run_dir)),
        "model-name": "m",
        "token-file": str(run_dir / "token"),
        "run-dir": str(run_dir),
    } | changes
    return [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]


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
        ({"role": None}, "one of the arguments --role --slot is required"),
        ({"model": "/nowhere"}, "--model: model folder /nowhere does not exist"),
        ({"prefill-engine-args": "{"}, "--prefill-engine-args is not JSON"),
        ({"decode-engine-args": "[]"}, "--decode-engine-args must be a JSON object"),
        ({"prefill-engine-args": '{"host": "::"}'}, "host"),
        (
            {"decode-engine-args": '{"no-such-argument": 1}'},
            "--decode-engine-args: SGLang has no argument no-such-argument",
        ),
        (
            {"engine-args": '{"log-level": "info"}', "decode-engine-args": '{"log-level": "debug"}'},
            "log-level is 'info' in --engine-args and 'debug' in --decode-engine-args",
        ),
        ({"http-port": "70000"}, "--http-port must be 1 to 65535"),
        ({"http-port": "30000", "bootstrap-port": "30000"}, "must differ"),
        ({"work-dir": "/proc/nowhere"}, "--work-dir /proc/nowhere"),
    ],
)
def test_wrong_flags_exit_with_2_and_name_the_flag(run_dir: Path, changes: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [*PYTHON, "agent", *_agent_flags(run_dir, **changes)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert TOKEN not in done.stderr


@pytest.mark.parametrize("role", list(Role))
def test_a_slot_refuses_what_an_engine_of_either_role_cannot_be_given(run_dir: Path, role: Role) -> None:
    flags = _agent_flags(run_dir, role=None, **{f"{role.value}-engine-args": '{"page-size": 1}'})
    done = subprocess.run([*PYTHON, "agent", "--slot", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "page-size" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--role", "decode"], "not allowed with argument"), (["--zygote", "/z.sock"], "leave --zygote out")],
)
def test_a_slot_has_neither_a_role_nor_a_shared_zygote(run_dir: Path, flags: list[str], words: str) -> None:
    given = [*_agent_flags(run_dir, role=None), "--slot", *flags]
    done = subprocess.run([*PYTHON, "agent", *given], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_arguments_for_both_roles_and_for_one_are_given_together(run_dir: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    changes = {"engine-args": '{"a": 1, "b": 2}', "prefill-engine-args": '{"b": 2, "c": 3}'}
    settings = settings_of(parser.parse_args(_agent_flags(run_dir, **changes)))
    assert settings.engine_args == {Role.PREFILL: {"a": 1, "b": 2, "c": 3}, Role.DECODE: {"a": 1, "b": 2}}


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
