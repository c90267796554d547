"""The chart, installed for some tests alone, in namespaces of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.kube import Kube

CHART = Path(__file__).parents[1] / "charts" / "kllm"
KINDS = ("inferenceservices", "prefillpools", "decodepools")
_GONE_SECONDS = 180.0


@dataclass(frozen=True)
class Release:
    """One installation.

    Attributes:
        cluster: where it is.
        name: of the release; roles of the whole cluster are named after it.
        system: namespace of the operator.
        watched: namespace whose services it keeps.
        values: the chart's values, without what `upgrade` adds.
    """

    cluster: Kube
    name: str
    system: str
    watched: str
    values: Mapping[str, Any]

    def upgrade(self, values: Mapping[str, Any] | None = None, *, chart: Path = CHART) -> None:
        """Install it, or bring it to other values or another chart, and wait until it runs.

        Args:
            values: over those that it was made with.
            chart: the chart's folder.
        """
        given = json.dumps(merged(self.values, values or {}))
        self.cluster.helm(
            *("upgrade", "--install", self.name, str(chart), "--values", "-"),
            *("--namespace", self.system, "--wait", "--timeout", "180s"),
            given=given,
        )

    def kllm(self, *arguments: str, seconds: float = 120.0) -> str:
        """Run `kubectl kllm` in the watched namespace and return what it printed.

        Raises:
            CommandError: it failed.
        """
        return self.cluster.plugin(*arguments, "--namespace", self.watched, seconds=seconds)


@contextmanager
def release(cluster: Kube, values: Mapping[str, Any] | None = None) -> Iterator[Release]:
    """The chart, installed; in the end all of it is gone, and the kinds too unless they were there before.

    Args:
        cluster: where to.
        values: over those under which pods run on this cluster.
    """
    name = f"e2e-{os.urandom(3).hex()}"
    had_kinds = bool(cluster.kubectl("get", "crds", "--output", "name", f"{KINDS[0]}.kllm.io", "--ignore-not-found"))
    with cluster.namespace(f"{name}-system") as system, cluster.namespace(name) as watched:
        given = merged(cluster.target.values, {"watchNamespaces": [watched]})
        made = Release(cluster, f"{name}-kllm", system, watched, merged(given, values or {}))
        try:
            made.upgrade()
            yield made
        finally:
            cluster.kubectl(
                *("delete", "llm", "--all", "--namespace", watched, "--ignore-not-found", "--cascade=foreground"),
                seconds=_GONE_SECONDS,
            )
            cluster.helm("uninstall", made.name, "--namespace", system, "--wait", "--ignore-not-found")
    if not had_kinds:
        for kind in KINDS:
            cluster.delete(f"customresourcedefinition/{kind}.kllm.io")


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a chart over others, as helm merges files of them."""
    result = dict(under)
    for key, value in over.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return result
