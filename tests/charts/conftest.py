"""What tests of the chart share."""

from __future__ import annotations

import shutil

import pytest
from charts.chart_helpers import CHART, HAS_MONITORS


@pytest.fixture(scope="session")
def monitored(tmp_path_factory):
    """The chart as on a cluster with the kinds of Prometheus' operator, of which rendering offline cannot be told."""
    chart = tmp_path_factory.mktemp("monitored") / "kllm"
    shutil.copytree(CHART, chart)
    for path in chart.glob("templates/**/*"):
        if path.is_file():
            path.write_text(path.read_text().replace(HAS_MONITORS, "true"))
    return chart
