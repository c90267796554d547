"""What a program does that runs in a container: its last words, and where it writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kllm_core.termination import tell_why
from kllm_engine.workdir import use_work_dir


def test_last_words_replace_those_before(tmp_path):
    log = tmp_path / "termination-log"
    log.write_text("something longer that was there before")
    tell_why("the engine ended", log)
    assert log.read_text() == "the engine ended"


def test_outside_of_a_container_no_file_is_made(tmp_path):
    tell_why("the engine ended", tmp_path / "termination-log")
    assert not list(tmp_path.iterdir())


def test_long_last_words_keep_their_first_line_and_their_end(tmp_path):
    log = tmp_path / "termination-log"
    log.touch()
    tell_why("the engine ended\n" + "\N{SNOWMAN}" * 5000 + "\nRuntimeError: no room", log)
    text = log.read_text()
    assert len(text.encode()) <= 4096
    assert text.startswith("the engine ended\n")
    assert text.endswith("RuntimeError: no room")


def test_everything_is_written_below_the_work_dir(tmp_path):
    environment = {"HOME": "/"}
    use_work_dir(tmp_path / "work", environment)
    assert environment["HOME"] == str(tmp_path / "work")
    for name in ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment[name].startswith(str(tmp_path / "work"))
        assert os.access(environment[name], os.W_OK)


def test_a_cache_that_the_pod_has_elsewhere_is_kept(tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared"), "USER": "somebody"}
    use_work_dir(tmp_path / "work", environment)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "shared")
    assert environment["USER"] == "somebody"


@pytest.mark.parametrize("subcommand", ["agent", "model"])
def test_programs_take_the_work_dir_before_they_do_anything(tmp_path, subcommand):
    flags = {
        "agent": ["--instance-id", "a", "--service", "s", "--slot", "--model", "/m", "--model-name", "m",
                  "--token-file", "/nowhere", "--run-dir", str(tmp_path)],
        "model": ["demo://nothing", "--cache", str(tmp_path)],
    }  # fmt: skip
    work = tmp_path / "work"
    program = [sys.executable, "-m", "kllm_engine.main", subcommand, *flags[subcommand], "--work-dir", str(work)]
    subprocess.run(program, capture_output=True, timeout=60, check=False)
    assert (work / "tmp").is_dir()
