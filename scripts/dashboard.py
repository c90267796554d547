"""The chart's dashboard, as Grafana reads it: `python scripts/dashboard.py FILE`. `make generate` writes it."""  # noqa: INP001

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WHICH = 'namespace="$namespace", service="$service"'
_COLUMNS = 24
_HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: above it.
        text: what it tells, for whoever asks.
        queries: legend and PromQL.
        unit: Grafana's name of it.
        kind: timeseries or stat.
        width: in columns of 24.
        threshold: value from which on it is bad, or good where more is better; None without.
        more_is_better: which side of the threshold is good.
        most: end of the axis; None leaves it to the values.
        stacked: values add up.
    """

    title: str
    text: str
    queries: Sequence[tuple[str, str]]
    unit: str
    kind: str = "timeseries"
    width: int = 12
    threshold: float | None = None
    more_is_better: bool = False
    most: float | None = None
    stacked: bool = False


def _quantile(stage: str, share: str) -> str:
    bucket = f"rate(kllm_router_request_{stage}_seconds_bucket{{{_WHICH}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({bucket}))"


def _objective(name: str) -> str:
    return f'max(kllm_operator_objective_seconds{{{_WHICH}, objective="{name}"}})'


def _promised(stage: str) -> str:
    return _quantile(stage, f"scalar(max(kllm_operator_objective_percentile_ratio{{{_WHICH}}}))")


def _met(stage: str) -> str:
    bucket = f"rate(kllm_router_request_{stage}_seconds_bucket{{{_WHICH}}}[$__rate_interval])"
    bound = f'kllm_operator_objective_seconds{{{_WHICH}, objective="{stage}"}}'
    count = f"rate(kllm_router_request_{stage}_seconds_count{{{_WHICH}}}[$__rate_interval])"
    return f"sum(sum by (namespace, service, le) ({bucket}) and on (namespace, service, le) {bound}) / sum({count})"


def _instances(role: str) -> list[tuple[str, str]]:
    states = ("desired", "ready", "warming", "draining", "failed", "slots")
    return [
        (state, f'max(kllm_operator_pool_instances{{{_WHICH}, role="{role}", state="{state}"}})') for state in states
    ]


def _load(role: str) -> list[tuple[str, str]]:
    return [
        (source, f'max(kllm_operator_pool_load_ratio{{{_WHICH}, role="{role}", source="{source}"}})')
        for source in ("decided", "predicted", "measured")
    ]


def _rate(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_WHICH}{more}}}[$__rate_interval]))"


_SHARES = (("50 %", "0.5"), ("90 %", "0.9"), ("99 %", "0.99"))

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Promise",
        (
            Panel(
                "TTFT met",
                "Share of requests whose first token came within the objective, rounded up to the next bucket.",
                [("met", _met("ttft"))],
                "percentunit", kind="stat", width=4, threshold=0.9, more_is_better=True,
            ),
            Panel(
                "TPOT met",
                "Share of requests whose tokens came within the objective, rounded up to the next bucket.",
                [("met", _met("tpot"))],
                "percentunit", kind="stat", width=4, threshold=0.9, more_is_better=True,
            ),
            Panel(
                "Promised share",
                "Share of requests that must meet each objective.",
                [("promised", f"max(kllm_operator_objective_percentile_ratio{{{_WHICH}}})")],
                "percentunit", kind="stat", width=4,
            ),
            Panel(
                "Errors",
                "Share of answers with a server error.",
                [("errors", f'sum(rate(kllm_router_requests_total{{{_WHICH}, code=~"5.."}}[$__rate_interval])) / '
                            f"sum(rate(kllm_router_requests_total{{{_WHICH}}}[$__rate_interval]))")],
                "percentunit", kind="stat", width=4, threshold=0.01,
            ),
            Panel(
                "Requests",
                "Answers per second.",
                [("answers", f"sum(rate(kllm_router_requests_total{{{_WHICH}}}[$__rate_interval]))")],
                "reqps", kind="stat", width=4,
            ),
            Panel(
                "In work",
                "Requests that routers carry.",
                [("in work", f"sum(kllm_router_inflight_requests{{{_WHICH}}})")],
                "short", kind="stat", width=4,
            ),
            Panel(
                "Time to first token",
                "At the client's edge. The promised percentile is to stay below the objective.",
                [("objective", _objective("ttft")), ("promised percentile", _promised("ttft")),
                 *((legend, _quantile("ttft", share)) for legend, share in _SHARES)],
                "s",
            ),
            Panel(
                "Time per output token",
                "At the client's edge, after the first token. The promised percentile is to stay below the objective.",
                [("objective", _objective("tpot")), ("promised percentile", _promised("tpot")),
                 *((legend, _quantile("tpot", share)) for legend, share in _SHARES)],
                "s",
            ),
        ),
    ),
    (
        "Pools",
        (
            Panel("Prefill load", "1 is the boundary of the objective.", _load("prefill"), "short", threshold=1.0),
            Panel("Decode load", "1 is the boundary of the objective.", _load("decode"), "short", threshold=1.0),
            Panel("Prefill instances", "By state.", _instances("prefill"), "short"),
            Panel("Decode instances", "By state.", _instances("decode"), "short"),
            Panel(
                "Start times",
                "How long the last start of each role took, from the decision until it served.",
                [("{{role}}", f"max by (role) (kllm_operator_pool_last_start_seconds{{{_WHICH}}})")],
                "s",
            ),
            Panel(
                "Conditions",
                "Conditions that are true.",
                [("{{type}}", f'max by (type) (kllm_operator_condition{{{_WHICH}, status="True"}})')],
                "short", most=1.0,
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Stages",
                "90th percentile of each stage of a request.",
                [(stage, _quantile(stage, "0.9")) for stage in ("queue", "prefill", "bind", "transfer")],
                "s",
            ),
            Panel(
                "Tokens",
                "Tokens of finished requests per second.",
                [("{{kind}}", _rate("kllm_router_tokens_total", "kind"))],
                "short",
            ),
            Panel(
                "Answers",
                "By HTTP status.",
                [("{{code}}", _rate("kllm_router_requests_total", "code"))],
                "reqps", stacked=True,
            ),
            Panel(
                "Recoveries",
                "Requests that went on elsewhere after a failure, and instances that were ejected.",
                [("retry {{role}} {{outcome}}", _rate("kllm_router_retries_total", "role, outcome")),
                 ("continuation {{outcome}}", _rate("kllm_router_continuations_total", "outcome")),
                 ("ejection {{role}}", _rate("kllm_router_ejections_total", "role"))],
                "ops",
            ),
        ),
    ),
    (
        "Operator",
        (
            Panel(
                "Reconciles",
                "By outcome; with nothing to do there are few.",
                [("{{outcome}}", "sum by (outcome) (rate(kllm_operator_reconciles_total[$__rate_interval]))")],
                "ops",
            ),
            Panel(
                "API calls",
                "By verb and code.",
                [("{{verb}} {{code}}",
                  "sum by (verb, code) (rate(kllm_operator_api_calls_total[$__rate_interval]))")],
                "ops",
            ),
        ),
    ),
)  # fmt: skip
"""Rows of panels, from what users are promised to what the operator does for it."""


def dashboard() -> dict[str, Any]:
    """The whole of it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_titled(title, len(panels) + 1, top))
        top += 1
        left = 0
        for panel in row:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _HEIGHT
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left += panel.width
        top += _HEIGHT
    return {
        "uid": "kllm-service",
        "title": "kLLM / Service",
        "description": "What a service promises, whether it keeps it, and what is done for it.",
        "tags": ["kllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    def query(name: str, text: str) -> dict[str, Any]:
        return {
            "name": name, "label": name.capitalize(), "type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1,
            "query": {"query": text, "refId": name}, "definition": text, "multi": False, "includeAll": False,
        }  # fmt: skip

    metric = "kllm_operator_objective_percentile_ratio"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "multi": False},
        query("namespace", f"label_values({metric}, namespace)"),
        query("service", f'label_values({metric}{{namespace="$namespace"}}, service)'),
    ]


def _titled(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    bad, good = ("green", "red") if panel.more_is_better else ("red", "green")
    steps: list[dict[str, Any]] = [{"color": good, "value": None}]
    if panel.threshold is not None:
        steps.append({"color": bad, "value": panel.threshold})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1, "fillOpacity": 10, "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.threshold is None else "line"},
        }  # fmt: skip
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"},
        }  # fmt: skip
    else:
        # Without a threshold there is nothing good or bad about a number.
        colour = "none" if panel.threshold is None else "value"
        options = {"colorMode": colour, "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
