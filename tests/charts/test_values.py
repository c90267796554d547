"""Values: described, used, checked; what is wrong is refused with the name of the value."""

from __future__ import annotations

import json
import re
import tomllib

import helm_python as helm
import pytest
import yaml
from charts.chart_helpers import CHART, ROOT, render, script

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = "".join(path.read_text() for path in CHART.glob("templates/**/*") if path.is_file())


def leaves(value, path=()):
    if isinstance(value, dict) and value and path[-1:] not in {("labels",), ("annotations",)}:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield ".".join(path)


chart_readme = script("chart_readme")
DESCRIBED = {path for path, _, _ in chart_readme.described((CHART / "values.yaml").read_text())}


@pytest.mark.parametrize("path", sorted(leaves(VALUES)))
def test_every_value_is_described_and_used(path):
    names = path.split(".")
    parents = {".".join(names[:count]) for count in range(1, len(names) + 1)}

    assert parents & DESCRIBED
    used = {f".Values.{parent}" for parent in parents}
    # Images are handed to a helper as a whole.
    assert any(re.search(re.escape(each) + r"\b", TEMPLATES) for each in used)


def test_the_readme_has_the_values():
    readme = (CHART / "README.md").read_text()

    assert chart_readme.with_table(readme, (CHART / "values.yaml").read_text()) == readme


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"operater": {}}, "operater"),
        ({"operator": {"replica": 2}}, "replica"),
        ({"operator": {"replicas": "2"}}, "replicas"),
        ({"operator": {"image": {"pullPolicy": "Sometimes"}}}, "pullPolicy"),
        ({"operator": {"image": {"digest": "abc"}}}, "digest"),
        ({"watchNamespaces": ["Team"]}, "watchNamespaces"),
        ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
        ({"imagePullSecrets": ["pull"]}, "imagePullSecrets"),
        ({"engine": {"template": {"containers": []}}}, "containers"),
        ({"engine": {"command": []}}, "command"),
        ({"router": {"drainSeconds": 0}}, "drainSeconds"),
        ({"loop": {"tick_seconds": "5"}}, "tick_seconds"),
        ({"metrics": {"serviceMonitor": {"interval": "soon"}}}, "interval"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values, name):
    with pytest.raises(helm.HelmValuesError, match=name):
        render(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operator": {"leaderElection": {"enabled": False}}}, "operator.replicas"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_what_to_do(values, message):
    with pytest.raises(helm.HelmError, match=message):
        render(values)


def test_the_schema_knows_every_value_and_no_other():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(value, part, path):
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" not in part or path.endswith(("template", "resources")):
            return
        assert part["additionalProperties"] is False, path
        assert set(value) == set(part["properties"]) - {"global"}, path
        for name, inner in value.items():
            check(inner, part["properties"][name], f"{path}.{name}")

    check(VALUES, schema, "values")


def test_the_chart_has_the_version_of_the_project():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_example_on_artifact_hub_is_the_one_in_the_repository():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    example = yaml.safe_load((ROOT / "examples" / "inferenceservice.yaml").read_text())

    assert yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"]) == [example]
