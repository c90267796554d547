"""Renders the chart without a cluster, as helm would."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import sys
from pathlib import Path

import helm_python as helm
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kllm"
HAS_MONITORS = '.Capabilities.APIVersions.Has "monitoring.coreos.com/v1"'

MONITORS = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "interval": "15s"},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://runbooks.example/"},
        "dashboards": {"enabled": True},
    }
}
MATRIX = {
    "default": {},
    "namespaced": {"watchNamespaces": ["team-a", "team-b"]},
    "single": {"operator": {"replicas": 1, "leaderElection": {"enabled": False}}},
    "bare": {
        "crds": {"install": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "networkPolicy": {"enabled": False},
    },
    "monitored": MONITORS,
    "adorned": {
        "nameOverride": "llms",
        "commonLabels": {"team": "a"},
        "imagePullSecrets": [{"name": "pull"}],
        "operator": {
            "image": {"registry": "registry.example", "digest": "sha256:" + "0" * 64},
            "extraArgs": ["--log-level", "debug"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "host", "hostPath": {"path": "/opt"}}],
            "extraVolumeMounts": [{"name": "host", "mountPath": "/opt", "readOnly": True}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "nodeSelector": {"e": "f"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "priorityClassName": "high",
        },
        "engine": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}, "pace": "0.1"},
        "router": {
            "template": {"metadata": {"labels": {"g": "h"}}}, "drainSeconds": 10, "workers": 3, "accessLog": True,
        },
        "loop": {"tick_seconds": 2.5},
        "serviceAccount": {"annotations": {"i": "j"}},
        "networkPolicy": {"clients": [{"podSelector": {}}], "metrics": []},
    },
}  # fmt: skip


def render(values=None, *, chart=CHART):
    """All documents of a release `kllm` in namespace `kllm-system`."""
    return copy.deepcopy(_rendered(str(chart), json.dumps(values or {}, sort_keys=True)))


@functools.cache
def _rendered(chart, values):
    made = helm.Chart.load(chart).render(json.loads(values), name="kllm", namespace="kllm-system")
    texts = [text for path, text in made.items() if not path.endswith("NOTES.txt")]
    # The kinds are long, and the loader in Python slow.
    loaded = (yaml.load_all(text, Loader=yaml.CSafeLoader) for text in texts)
    return [document for documents in loaded for document in documents if document]


def script(name):
    """A module of scripts/, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def notes(values=None):
    made = helm.Chart.load(str(CHART)).render(values or {}, name="kllm", namespace="kllm-system")
    (text,) = (text for path, text in made.items() if path.endswith("NOTES.txt"))
    return text


def of_kind(documents, kind, name=None):
    return [each for each in documents if each["kind"] == kind and name in {None, each["metadata"]["name"]}]


def pods(documents):
    """Pod templates by the kind and name of what makes them."""
    return {
        (each["kind"], each["metadata"]["name"]): each["spec"]["template"]
        for each in documents
        if "template" in each.get("spec", {}) and each["kind"] in {"Deployment", "Job"}
    }
