from __future__ import annotations

from pathlib import Path

from kllm_engine.agent.logtail import EngineLog


def test_the_last_lines_stand_under_the_message_without_the_token(run_dir: Path) -> None:
    path = run_dir / "engine.log"
    lines = [f"line {number}" for number in range(5000)] + ["server_args={'api_key': 'the-token'}", "out of memory"]
    path.write_text("\n".join(lines))
    text = EngineLog(path, "the-token").under("the engine ended")
    assert text.startswith(f"the engine ended\nlast lines of {path}:\n")
    assert text.endswith("{'api_key': '(token)'}\nout of memory")
    assert "the-token" not in text
    assert len(text.splitlines()) == 22


def test_without_a_log_the_message_stands_alone(run_dir: Path) -> None:
    assert EngineLog(run_dir / "nowhere", "the-token").under("the engine ended") == "the engine ended"
