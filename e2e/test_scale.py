"""Twenty services on a real API server without nodes: what the operator writes, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parents[1]
_SECONDS = 240.0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a small run of the benchmark, which has a control plane of its own."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    result = tmp_path_factory.mktemp("scale") / "result.json"
    command = [sys.executable, str(_REPOSITORY / "bench" / "operator" / "measure.py"), "--quick"]
    subprocess.run(
        [*command, "--services", "20", "--pods", "4", "--rest", "5", "--json", str(result)],
        check=True, cwd=_REPOSITORY, env={**os.environ, "PYTHONPATH": str(_REPOSITORY)}, timeout=_SECONDS,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(result.read_text())
    return told


@pytest.mark.timeout(_SECONDS + 30)
@pytest.mark.parametrize("phase", ["rest", "resync", "restart"])
def test_nothing_is_written_when_nothing_changed(measured: dict[str, Any], phase: str) -> None:
    assert measured[phase]["written"] == {}


def test_a_service_costs_a_bounded_number_of_calls(measured: dict[str, Any]) -> None:
    calls = measured["create"]["calls_per_service"]
    assert calls["create pods"] == 4
    assert all(calls[f"apply {kind}"] == 1 for kind in ("prefillpools", "decodepools", "services", "deployments"))
    assert sum(count for what, count in calls.items() if what.endswith("/status")) <= 24
    assert measured["create"]["writes_per_service"] <= 50
    assert calls.get("list events", 0) <= 2
    assert not [code for code in measured["create"]["codes"] if code.startswith("5")]


@pytest.mark.parametrize(
    ("change", "writes"),
    [("larger bounds", 5), ("one more instance", 16), ("a pod that fails", 14), ("a pod that is deleted", 12)],
)
def test_a_change_costs_a_bounded_number_of_writes_and_none_elsewhere(
    measured: dict[str, Any], change: str, writes: int
) -> None:
    assert 0 < measured["changes"][change]["writes_most"] <= writes
    assert measured["changes"]["writes_elsewhere"] == 0
