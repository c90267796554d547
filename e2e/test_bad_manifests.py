"""Manifests that cannot be served: refused by the API server with the reason, else told in a condition in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from crds.bad_manifests import BadManifest, bad_manifests

from e2e.kube import CommandError, Kube
from e2e.llm import Llm
from e2e.pods import host_pod
from e2e.release import Release, release
from e2e.results import Result, result

pytestmark = pytest.mark.timeout(600)

ALL = bad_manifests()
REFUSED = [each for each in ALL if each.refused]
TOLD = [each for each in ALL if each.condition]
_TOLD_SECONDS = 10.0
_HUB = """
import http.server

class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
    do_HEAD = do_GET

http.server.HTTPServer(("", 8080), Hub).serve_forever()
"""
"""A hub that has no model at all."""


@pytest.fixture(scope="module")
def installed_here(cluster: Kube) -> Iterator[Release]:
    with release(cluster, {"engine": {"drainSeconds": 5}}) as made:
        yield made


@pytest.fixture(scope="module")
def kept(installed_here: Release) -> Iterator[Result]:
    del installed_here  # its time is no part of this
    with result("bad_manifests") as made:
        yield made


@pytest.fixture(scope="module")
def hub(installed_here: Release) -> str:
    """Address of a hub within the cluster."""
    cluster, namespace = installed_here.cluster, installed_here.watched
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hub"},
        "spec": {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    cluster.apply(host_pod("hub", ["-c", _HUB], readinessProbe=probe), service, namespace=namespace)
    cluster.wait("pod/hub", "condition=Ready", namespace=namespace)
    return f"http://hub.{namespace}.svc"


@pytest.mark.parametrize("case", REFUSED, ids=[each.name for each in REFUSED])
def test_what_schema_and_rules_can_see_is_refused_with_the_reason(
    case: BadManifest, unwatched: str, cluster: Kube
) -> None:
    refused = case.change or case.manifest
    if case.change:
        _say(cluster, unwatched, "create", case.manifest)
    with pytest.raises(CommandError) as caught:
        _say(cluster, unwatched, "replace" if case.change else "create", refused)
    assert case.refused is not None
    assert case.refused in str(caught.value)


@pytest.mark.parametrize("case", TOLD, ids=[each.name for each in TOLD])
def test_what_only_the_operator_can_see_is_told_within_ten_seconds(
    case: BadManifest, installed_here: Release, hub: str, kept: Result
) -> None:
    assert case.condition is not None
    cluster, namespace = installed_here.cluster, installed_here.watched
    llm = Llm(cluster, namespace, case.manifest["metadata"]["name"])
    _say(cluster, namespace, "create", _asking(case.manifest, hub))
    try:
        began = time.monotonic()
        told = llm.wait_for_condition(
            case.condition.type, case.condition.status, case.condition.reason, seconds=_TOLD_SECONDS
        )
        kept.note(case.name, {"seconds": round(time.monotonic() - began, 2), "message": told["message"]})
        assert case.condition.message in told["message"]
        ready = llm.wait_for_condition("Ready", "False", case.condition.reason, seconds=2)
        assert case.condition.message in ready["message"], "who waits for Ready reads why it is not"
    finally:
        cluster.delete(f"llm/{llm.name}", namespace=namespace)
        llm.wait(lambda: not llm.pods(), "its pods are gone", seconds=60)


@pytest.fixture
def unwatched(cluster: Kube, installed_here: Release) -> Iterator[str]:
    """A namespace that no operator keeps."""
    namespace = installed_here.system
    yield namespace
    cluster.kubectl("delete", "llm,pp,dp", "--all", "--namespace", namespace)


def _say(cluster: Kube, namespace: str, verb: str, document: dict[str, Any]) -> None:
    cluster.kubectl(verb, "--validate=strict", "--namespace", namespace, "--filename", "-", given=json.dumps(document))


def _asking(manifest: dict[str, Any], hub: str) -> dict[str, Any]:
    """The manifest with engines that fetch their model from this hub."""
    changed = deepcopy(manifest)
    if changed["spec"]["model"]["uri"].startswith("hf://"):
        model = {"name": "model", "env": [{"name": "HF_ENDPOINT", "value": hub}]}
        for part in ("prefill", "decode"):
            changed["spec"][part]["template"] = {"spec": {"initContainers": [model]}}
    return changed
