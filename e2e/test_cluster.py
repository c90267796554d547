"""The cluster itself: pods run, Services route, names resolve, and a pod can use the machine's environment."""

from __future__ import annotations

import urllib.request

import pytest
from kubernetes.aio import client

from e2e.cluster.cluster import Cluster
from e2e.kube import CommandError, Kube
from e2e.pods import USER, host_pod

_WEB = "import http.server as s; s.HTTPServer(('', 8080), s.SimpleHTTPRequestHandler).serve_forever()"


def test_a_service_routes_to_a_pod_by_name_and_address(cluster: Kube, namespace: str) -> None:
    probe = {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    cluster.apply(host_pod("web", ["-c", _WEB], readinessProbe=probe), service, namespace=namespace)
    cluster.wait("pod/web", "condition=Ready", namespace=namespace)
    with cluster.reach("web", 80, namespace=namespace) as address:
        assert urllib.request.urlopen(f"http://{address}/", timeout=5).status == 200
    ask = f"import urllib.request as r; print(r.urlopen('http://web.{namespace}.svc.cluster.local', timeout=5).status)"
    cluster.apply(host_pod("client", ["-c", ask]), namespace=namespace)
    cluster.wait("pod/client", "jsonpath={.status.phase}=Succeeded", namespace=namespace)
    assert cluster.kubectl("logs", "client", "--namespace", namespace) == "200\n"


def test_a_pod_without_rights_imports_the_engine_from_the_machines_environment(cluster: Kube, namespace: str) -> None:
    code = "import os, sglang, kllm_engine; print(os.getuid(), sglang.__version__)"
    cluster.apply(host_pod("engine", ["-c", code]), namespace=namespace)
    cluster.wait("pod/engine", "jsonpath={.status.phase}=Succeeded", namespace=namespace, seconds=120)
    assert cluster.kubectl("logs", "engine", "--namespace", namespace).splitlines()[-1].startswith(f"{USER} ")


def test_commands_run_inside_a_pod(cluster: Kube, namespace: str) -> None:
    cluster.apply(host_pod("web", ["-c", _WEB]), namespace=namespace)
    cluster.wait("pod/web", "condition=Ready", namespace=namespace)
    assert cluster.kubectl("exec", "web", "--namespace", namespace, "--", "id", "-u") == f"{USER}\n"
    with pytest.raises(CommandError, match="Read-only file system"):
        cluster.kubectl("exec", "web", "--namespace", namespace, "--", "touch", "/file")


def test_objects_outlive_a_killed_api_server(cluster: Kube, components: Cluster, namespace: str) -> None:
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"key": "value"}}
    cluster.apply(document, namespace=namespace)
    components.stop("kube-apiserver", kill=True)
    with pytest.raises(CommandError, match="refused"):
        cluster.kubectl("get", "--raw=/readyz")
    components.start("kube-apiserver")
    components.wait_for_api()
    assert cluster.get("configmap", "kept", namespace=namespace)["data"] == {"key": "value"}


async def test_the_python_client_reaches_the_api_server(cluster: Kube, namespace: str) -> None:
    async with await cluster.api() as api:
        found = await client.CoreV1Api(api).read_namespace(namespace)
    assert found.metadata is not None
    assert found.metadata.name == namespace
