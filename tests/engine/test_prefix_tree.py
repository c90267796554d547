"""The incremental prefix tree does what SGLang's does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kllm_engine.messages import PREFIX_TREE_VARIABLE
from kllm_engine.sglang import hooks


def test_the_same_requests_give_the_same_matches_locks_events_and_evictions_as_on_sglangs_tree():
    command = [sys.executable, str(Path(__file__).with_name("prefix_tree_program.py")), "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("examined", "appended")))
    assert int(told["examined"]) >= 120
    assert int(told["appended"]) >= 50


def test_a_tree_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(PREFIX_TREE_VARIABLE, "quick")
    with pytest.raises(ValueError, match="KLLM_PREFIX_TREE must be stock or incremental, got 'quick'"):
        hooks.table()


def test_the_tree_is_sglangs_own_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(PREFIX_TREE_VARIABLE, raising=False)
    assert hooks.table() is hooks.TABLE
