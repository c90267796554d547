"""The demo, with the real model: one right answer, one line of figures, nothing left."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from service_under_test import KLLM

pytestmark = pytest.mark.engines

EXAMPLE = Path(__file__).parents[2] / "examples" / "inferenceservice.yaml"
LAST_LINE = re.compile(
    r"demo: ttft_ms=\d+ tpot_ms=\d+\.\d prefill=chat-prefill-0 decode=chat-decode-0 binding=late elapsed_s=\d+\.\d"
)


def test_the_demo_answers_rightly_and_tells_its_figures():
    done = subprocess.run([*KLLM, "demo", "-f", str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
