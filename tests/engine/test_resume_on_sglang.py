"""SGLang's own detokeniser and its parsers for tools and reasoning go on wherever a stream breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def told_by(program: str) -> list[str]:
    """What a program beside this file prints."""
    command = [sys.executable, str(Path(__file__).with_name(program))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def cases():
    return [json.loads(line) for line in told_by("resume_parsers_program.py") if line.startswith("{")]


def test_text_is_that_of_the_detokeniser_whatever_comes_together_and_wherever_it_breaks():
    assert told_by("resume_detokenizer_program.py") == ["examined 1500"]


def test_every_parser_tells_the_same_whatever_comes_together_and_wherever_it_breaks(cases):
    assert len(cases) == 10
    assert {str(case["parsers"]): case["wrong"] for case in cases if case["wrong"]} == {}


def test_the_cases_have_calls_and_many_places_to_break(cases):
    assert sum(case["calls"] > 0 for case in cases) == 8
    assert all(case["chunks"] >= 6 for case in cases)
