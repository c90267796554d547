"""Paced real engines under load: each pool follows its own load, work that moves flips an instance, all leave again."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from elastic.elastic_service import PACE, TUNE, ElasticService, Load, document, elastic

from kllm.bench.machine import machine_facts

pytestmark = [
    pytest.mark.skipif(not os.environ.get("KLLM_ELASTIC"), reason="takes six minutes; run it with: make elastic"),
    pytest.mark.timeout(1200),
]

PROMPTS = Load(rate=2.5, seconds=60, prompt_tokens=300, output_tokens=4)
ANSWERS = Load(rate=2.0, seconds=60, prompt_tokens=30, output_tokens=60)
RESULTS = Path(__file__).parents[2] / "bench" / "elastic" / "results"


def roles_of(events, step):
    return [event["role"] for event in events if event["step"] == step]


def started(service: ElasticService, began: float):
    return roles_of(service.since(began, "action"), "Start")


def assert_all_answered(summary):
    assert summary["ok"] == summary["planned"], summary
    assert summary["wrong_lengths"] == 0


def assert_each_start_was_asked_for(service: ElasticService):
    """A start follows from a load above 1 in the plan before it, or replaces what failed."""
    plan = None
    for event in service.events:
        if event["event"] == "plan":
            plan = event
        if event["event"] == "action" and event["step"] == "Start":
            role = event["role"]
            load = re.search(rf"{role} \d+ to \d+: load ([\d.]+) with", plan["message"])
            assert load is not None, (event, plan["message"])
            assert float(load[1]) > 1
    assert service.since(0, "failure") == []


def assert_each_change_has_a_reason(service: ElasticService):
    for event in service.since(0, "plan"):
        assert event["reason"]
        assert event["message"]
        assert event["line"].startswith("plan: prefill ")
    for event in service.since(0, "action"):
        assert event["reason"]
        assert event["message"]


def rest(service: ElasticService) -> float:
    def is_at_rest():
        return service.counts() == (1, 1) and len(service.state()["instances"]) == 2

    return service.wait_until(is_at_rest, seconds=150, what="one instance of each")


def test_each_pool_follows_its_load_and_work_that_moves_flips_an_instance():
    report = {"machine": machine_facts(), "pace": PACE, "tune": TUNE, "phases": []}
    with elastic(document(budget=4)) as service:

        def phase(name, load):
            began = time.time()
            summary = service.send(load)
            report["phases"].append({"name": name, "began": began, "ended": time.time(), "summary": summary})
            assert_all_answered(summary)
            return began

        try:
            began = phase("prompts", PROMPTS)
            assert set(started(service, began)) == {"prefill"}
            assert service.counts()[0] >= 2
            report["idle_after_prompts_seconds"] = rest(service)

            began = phase("answers", ANSWERS)
            assert set(started(service, began)) == {"decode"}
            assert service.counts() == (1, 3)

            began = phase("prompts again", PROMPTS)
            assert roles_of(service.since(began, "action"), "Flip")[:1] == ["prefill"]
            assert service.since(began, "outcome", step="Flip")[0]["error"] is None
            assert "decode" not in started(service, began)
            report["idle_at_the_end_seconds"] = rest(service)

            assert_each_start_was_asked_for(service)
            assert_each_change_has_a_reason(service)
            report["flips"] = [
                {**serving, "switch_seconds": switch["switch_seconds"]}
                for serving in service.since(0, "capacity", how="Flip")
                for switch in service.since(0, "outcome", step="Flip", instance=serving["instance"])
            ]
            report["starts"] = [
                event["decision_to_serving_seconds"] for event in service.since(0, "capacity", how="Start")
            ]
        finally:
            report["timeline"] = [event for event in service.events if event["event"] != "step"]
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / "elastic.json").write_text(json.dumps(report, indent=1) + "\n")
