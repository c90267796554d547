"""What is packed into the chart: kinds, rules and the dashboard are those of the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from charts.chart_helpers import CHART, MONITORS, ROOT, of_kind, render, script
from prometheus_client import CollectorRegistry

from kllm_core.conditions import ConditionType
from kllm_core.kinds.crds import files
from kllm_operator.metrics import OperatorMetrics
from kllm_operator.service.collector import ServiceCollector
from kllm_router.metrics import RouterMetrics

RULES = CHART / "files" / "rules" / "kllm.yaml"
DASHBOARD = CHART / "files" / "dashboards" / "kllm-service.json"
UNIT_TESTS = Path(__file__).with_name("rules_test.yaml")
PROMTOOL = shutil.which("promtool", path=os.environ.get("PATH", ""))
METRIC = re.compile(r"\bkllm_[a-z_]+")


def known_metrics():
    registry = CollectorRegistry()
    registry.register(ServiceCollector(list))
    names = set()
    for source in (RouterMetrics().registry, OperatorMetrics().registry, registry):
        for family in [*source.collect(), *(each for c in source._collector_to_names for each in c.describe())]:
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
            names |= {family.name + suffix for suffix in suffixes}
    return names


def expressions():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())
    variables = [each["definition"] for each in panels["templating"]["list"] if "definition" in each]
    targets = [target["expr"] for panel in panels["panels"] for target in panel.get("targets", ())]
    return [rule["expr"] for rule in rules] + variables + targets, {rule.get("record") for rule in rules}


def test_the_packed_kinds_are_the_generated_ones():
    packed = {path.name: path.read_text() for path in (CHART / "files" / "crds").iterdir()}

    assert packed == files()
    assert packed == {path.name: path.read_text() for path in (ROOT / "crds").iterdir()}


def test_the_job_gets_the_kinds_as_they_are_and_fits_a_configmap():
    (config,) = of_kind(render(), "ConfigMap", "kllm-crds")

    # Helm ends a block without the last line break.
    assert {name: text.rstrip("\n") for name, text in config["data"].items()} == {
        name: text.rstrip("\n") for name, text in files().items()
    }
    assert sum(map(len, config["data"].values())) < 900_000


def test_the_dashboard_is_the_generated_one():
    made = json.dumps(script("dashboard").dashboard(), indent=2) + "\n"

    assert made == DASHBOARD.read_text()


def test_every_metric_of_rules_and_dashboard_is_one_that_the_code_has():
    texts, _ = expressions()
    used = {name for text in texts for name in METRIC.findall(re.sub(r"service:kllm\S*", "", text))}

    assert used
    assert used <= known_metrics()


def test_rules_build_on_records_that_are_made():
    texts, records = expressions()

    assert {name for text in texts for name in re.findall(r"service:kllm[a-z_]*:[a-z_0-9]*", text)} <= records


def test_conditions_of_alerts_are_those_of_the_kinds():
    texts, _ = expressions()
    named = {name for text in texts for name in re.findall(r'type="([A-Za-z]+)"', text)}

    assert named <= {each.value for each in ConditionType}


def test_alerts_say_what_is_wrong_and_how_urgent_it_is():
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert re.fullmatch("Kllm[A-Z][A-Za-z]+", rule["alert"])
                assert rule["labels"]["severity"] in {"page", "ticket"}
                assert {"summary", "description"} <= rule["annotations"].keys()


def test_alerts_lead_to_runbooks_where_there_are_some(monitored):
    (rule,) = of_kind(render(MONITORS, chart=monitored), "PrometheusRule")
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]

    assert alerts[0]["annotations"]["runbook_url"] == "https://runbooks.example/kllmttftobjectivemissed"
    # Prometheus' own placeholders must reach Prometheus.
    assert "{{ $labels.namespace }}" in alerts[0]["annotations"]["summary"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here (Debian package prometheus)")
def test_rules_do_what_they_promise_and_panels_ask_what_prometheus_understands(tmp_path):
    shutil.copy(RULES, tmp_path / "kllm.yaml")
    shutil.copy(UNIT_TESTS, tmp_path / "rules_test.yaml")
    # promtool reads expressions in rules only, so those of the dashboard are made rules.
    texts, _ = expressions()
    asked = [text.replace("$__rate_interval", "5m") for text in texts if not text.startswith("label_values")]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(asked)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    for command in (["check", "rules", "kllm.yaml", "panels.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            [PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_panels_do_not_overlap_and_say_what_they_tell():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    assert len({panel["id"] for panel in panels}) == len(panels)
