"""What breaks on a cluster, and what tests look at while it does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from substrate.substrate_helpers import processes_with

from e2e import traffic
from e2e.cluster.cluster import Cluster
from e2e.cluster.components import API
from e2e.kube import CommandError, Kube
from e2e.llm import Llm
from e2e.release import Release
from e2e.results import FOLDER
from kllm.bench.machine import machine_facts

_FILE = FOLDER / "faults.json"
_STREAM_SECONDS = 180.0
_STATUS_SECONDS = 5.0
_DRAIN_SECONDS = 240.0

Object = tuple[str, str, str]
"""Kind, name and uid."""


def leader(release: Release) -> str:
    """The operator's pod that holds the Lease; empty if none does."""
    lease = release.cluster.get("lease", release.name, namespace=release.system)
    holder: str = lease["spec"].get("holderIdentity") or ""
    return holder.partition("_")[0]


def kill(cluster: Kube, pod: str, *, namespace: str) -> None:
    """Take a pod's processes and object away at once; no process of it hears of it where the node is this machine."""
    if cluster.target.own is not None:
        for process in processes_with("POD_NAME", pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    cluster.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--namespace", namespace)


def pods_made(llm: Llm) -> set[str]:
    """Names of all engine pods of a service that ever came to a node, those that are gone too."""
    names = {event["regarding"]["name"] for event in llm.events("Scheduled")}
    return {name for name in names if name.startswith(f"{llm.name}-engine-")}


def routers(llm: Llm) -> dict[str, str]:
    """Names and addresses (HOST:PORT) of a service's routers that are ready and stay."""
    labels = f"kllm.io/service={llm.name},app.kubernetes.io/component=router"
    found = llm.cluster.list("pods", namespace=llm.namespace, labels=labels)
    return {
        pod["metadata"]["name"]: f"{pod['status']['podIP']}:8000"
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
        and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
    }


def in_flight(router: str) -> int:
    """Requests that the router at HOST:PORT holds."""
    count: int = status(router)["in_flight"]
    return count


def known(router: str) -> set[str]:
    """Names of the instances that the router at HOST:PORT hears of, and that serve."""
    return {each["id"] for each in status(router)["instances"] if each["state"] == "Serving" and not each["silent"]}


def operators(release: Release) -> int:
    """How many pods of the operator there are, whatever state they are in."""
    return len(release.cluster.list("pods", namespace=release.system, labels="app.kubernetes.io/component=operator"))


def objects(cluster: Kube, namespace: str, *, labels: str = "") -> set[Object]:
    """All that is in a namespace, or what of it a label selector finds; not events, which outlive what they tell of."""
    listed = cluster.kubectl("api-resources", "--verbs=list,delete", "--namespaced", "--output=name").split()
    kinds = ",".join(each for each in listed if not each.startswith("events"))
    found = cluster.list(kinds, namespace=namespace, labels=labels)
    return {(each["kind"], each["metadata"]["name"], each["metadata"]["uid"]) for each in found}


@contextmanager
def without_api(cluster: Cluster) -> Iterator[None]:
    """A cluster whose API server is away; it answers again after the context."""
    cluster.stop(API)
    try:
        yield
    finally:
        cluster.start(API)
        cluster.wait_for_api()


@contextmanager
def too_many_requests(release: Release) -> Iterator[Callable[[], float]]:
    """An API server that refuses all calls of the operator with 429, by priority and fairness; how many it refused."""
    cluster, name = release.cluster, f"{release.name}-refused"
    group = "flowcontrol.apiserver.k8s.io/v1"
    cluster.apply(
        {
            "apiVersion": group, "kind": "PriorityLevelConfiguration", "metadata": {"name": name},
            "spec": {
                "type": "Limited",
                "limited": {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
                            "limitResponse": {"type": "Reject"}},
            },
        }
    )  # fmt: skip
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
    account = {"namespace": release.system, "name": release.name}
    cluster.apply(
        {
            "apiVersion": group, "kind": "FlowSchema", "metadata": {"name": name},
            "spec": {
                "priorityLevelConfiguration": {"name": name}, "matchingPrecedence": 2,
                "rules": [{"subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
                           "resourceRules": [everything]}],
            },
        }
    )  # fmt: skip

    def refused() -> float:
        told = cluster.kubectl("get", "--raw=/metrics").splitlines()
        counts = (
            line
            for line in told
            if line.startswith("apiserver_flowcontrol_rejected_requests_total{") and f'priority_level="{name}"' in line
        )
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    try:
        yield refused
    finally:
        cluster.delete(f"flowschema/{name}")
        cluster.delete(f"prioritylevelconfiguration/{name}")


@contextmanager
def draining(cluster: Kube, node: str, *, selector: str) -> Iterator[subprocess.Popen[str]]:
    """`kubectl drain` of a node, under way; in the end the node takes pods again."""
    command = [
        *(str(cluster.target.kubectl), f"--kubeconfig={cluster.target.kubeconfig}", "drain", node),
        *(f"--pod-selector={selector}", "--delete-emptydir-data", f"--timeout={_DRAIN_SECONDS:.0f}s"),
        "--disable-eviction=false",
    ]
    drain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield drain
    finally:
        drain.kill()
        drain.communicate()
        cluster.kubectl("uncordon", node)


class Streams:
    """Long answers, asked for at once and read side by side.

    Attributes:
        problems: of those that ended wrong.
        ended: monotonic seconds at which each ended.

    Args:
        address: HOST:PORT.
        model: its name.
        right: the answer to the one prompt that all ask.
        count: how many.
        tokens: of each.
    """

    def __init__(self, address: str, *, model: str, right: str, count: int, tokens: int) -> None:
        self.problems: list[str] = []
        self.ended: list[float] = []
        self._ask = {"address": address, "model": model, "number": 0, "tokens": tokens}
        self._right = right
        self._threads = [threading.Thread(target=self._read, name=f"long stream {number}") for number in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all to end.

        Raises:
            AssertionError: one does not end.
        """
        for thread in self._threads:
            thread.join(_STREAM_SECONDS)
            if thread.is_alive():
                raise AssertionError(f"a stream did not end within {_STREAM_SECONDS:.0f} s")

    def _read(self) -> None:
        try:
            text = traffic.ask(**self._ask)  # type: ignore[arg-type]
            if text != self._right:
                self.problems.append(
                    f"{text[-200:]!r} at the end, of {len(text)} instead of {len(self._right)} letters"
                )
        except Exception as error:  # noqa: BLE001  whatever it is, the stream did not end well
            self.problems.append(f"{type(error).__name__}: {error}")
        self.ended.append(time.monotonic())


def record(row: str, figures: dict[str, Any]) -> None:
    """Keep the figures of one fault in the results' file, beside those of the others."""
    kept = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    rows = {**kept.get("faults", {}), row: figures}
    FOLDER.mkdir(exist_ok=True)
    document = {"machine": machine_facts(), "faults": dict(sorted(rows.items()))}
    _FILE.write_text(json.dumps(document, indent=1) + "\n")


def gone(cluster: Kube, pod: str, *, namespace: str) -> bool:
    """Whether a pod's object is there no more."""
    try:
        cluster.get("pod", pod, namespace=namespace)
    except CommandError:
        return True
    return False


def status(router: str) -> dict[str, Any]:
    """What the router at HOST:PORT says of itself."""
    connection = http.client.HTTPConnection(router, timeout=_STATUS_SECONDS)
    try:
        connection.request("GET", "/kllm/v1/status")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()
