"""What breaks while requests come in: the table of the design, a row at a time, on real engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import faults, traffic
from e2e.cluster.cluster import Cluster
from e2e.faults import Streams
from e2e.llm import MODEL, Llm, manifest, reached, serving
from e2e.release import Release
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(420)

_LEASE_SECONDS = 15.0
"""After which another operator leads."""
_SLACK_SECONDS = 6.0
_STARTED_SECONDS = 120.0
_OUTAGE_SECONDS = 20.0
_LAME_DUCK_SECONDS = 5.0
_ENOUGH = 10
"""Requests that show that it goes on."""
_LONG_TOKENS = 2000
_REFUSED_SECONDS = 6.0
_GONE_SECONDS = 120.0
_LIKE = (
    ("pods", "app.kubernetes.io/component=engine"),
    ("deployments", "app.kubernetes.io/component=router,kllm.io/service=chat"),
    ("secrets", "app.kubernetes.io/component=fleet,kllm.io/service=chat"),
)
"""What strangers look like."""


@pytest.fixture(scope="module")
def llm(installed: Release) -> Iterator[Llm]:
    """A service whose counts are the test's, with two routers."""
    sides = {"minReplicas": 1, "maxReplicas": 3}
    document = manifest("chat", prefill=sides, decode=sides, scaling="External", router={"replicas": 2})
    with serving(installed.cluster, installed.watched, document) as made:
        made.wait(lambda: len(faults.routers(made)) == 2, "both routers are ready", seconds=_STARTED_SECONDS)
        yield made


@pytest.fixture(scope="module")
def address(llm: Llm) -> Iterator[str]:
    """HOST:PORT of the routers' Service."""
    with reached(llm) as found:
        yield found


@pytest.fixture(scope="module")
def long_answer(address: str) -> str:
    """The right answer of long streams, given in peace."""
    return traffic.ask(address, model=MODEL, number=0, tokens=_LONG_TOKENS)


def test_another_operator_leads_and_ends_what_a_killed_leader_began(llm: Llm, address: str, installed: Release) -> None:
    _at(llm, 1, 1)
    before, made_before, first = {pod.name for pod in llm.pods()}, faults.pods_made(llm), faults.leader(installed)
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        llm.scale("prefill", 2)
        llm.scale("decode", 2)
        llm.wait(lambda: len(llm.pods()) > 2, "a pod is made", seconds=30)
        assert llm.counts() == (1, 1), "the leader is killed too late"
        killed = time.monotonic()
        faults.kill(llm.cluster, first, namespace=installed.system)
        taken = llm.wait(
            lambda: faults.leader(installed) not in {"", first}, "another leads",
            seconds=_LEASE_SECONDS + _SLACK_SECONDS,
        )  # fmt: skip
        llm.wait(lambda: llm.has(2, 2), "the scaling ends", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - killed
        load.go_on(_ENOUGH)
    assert load.failed == []
    assert {pod.name for pod in llm.pods()} > before
    assert len(faults.pods_made(llm) - made_before) == 2
    _record("operator leader killed", recovered, load, takeover_seconds=round(taken, 1))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_lost_engine_is_replaced_and_its_requests_go_on(llm: Llm, address: str, role: str) -> None:
    _at(llm, 2, 2)
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        lost = llm.pods(role)[0].name
        killed = time.monotonic()
        faults.kill(llm.cluster, lost, namespace=llm.namespace)
        load.go_on(_ENOUGH)
        llm.wait(lambda: llm.has(2, 2), "it is replaced", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - killed
        load.go_on(_ENOUGH)
    assert load.failed == []
    assert lost not in {pod.name for pod in llm.pods()}
    _record(f"{role} pod deleted by force", recovered, load)


def test_a_router_that_is_deleted_ends_its_streams_first(
    llm: Llm, address: str, components: Cluster, long_answer: str
) -> None:
    del components  # whose pods can be reached at their own addresses
    _at(llm, 1, 1)
    leaving, its_address = next(iter(faults.routers(llm).items()))
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        streams = Streams(its_address, model=MODEL, right=long_answer, count=2, tokens=_LONG_TOKENS)
        llm.wait(lambda: faults.in_flight(its_address) >= 2, "the streams run", seconds=30)
        deleted = time.monotonic()
        llm.cluster.kubectl("delete", "pod", leaving, "--wait=false", "--namespace", llm.namespace)
        llm.wait(lambda: leaving not in faults.routers(llm), "it is on its way out", seconds=10)
        streams.join()
        assert streams.problems == []
        assert min(streams.ended) > deleted + _LAME_DUCK_SECONDS, "the streams are too short to show anything"
        llm.wait(lambda: faults.gone(llm.cluster, leaving, namespace=llm.namespace), "it is gone", seconds=60)
        drained = time.monotonic() - deleted
        llm.wait(lambda: len(faults.routers(llm)) == 2, "it is replaced", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - deleted
        load.go_on(_ENOUGH)
    assert load.failed == []
    _record("router pod deleted", recovered, load, drained_seconds=round(drained, 1))


def test_requests_go_on_without_an_api_server_and_so_do_all_once_it_is_back(
    llm: Llm, address: str, components: Cluster
) -> None:
    _at(llm, 1, 2)
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        with faults.without_api(components):
            stopped = time.monotonic()
            while time.monotonic() < stopped + _OUTAGE_SECONDS:
                load.go_on(_ENOUGH)
        back = time.monotonic()
        # What happens before watches are there again must not be missed.
        lost = llm.pods("decode")[0].name
        faults.kill(llm.cluster, lost, namespace=llm.namespace)
        llm.scale("prefill", 2)
        llm.wait(lambda: llm.has(2, 2), "the operator goes on", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - back
        names = {pod.name for pod in llm.pods()}
        addresses = faults.routers(llm).values()
        llm.wait(lambda: all(faults.known(each) == names for each in addresses), "routers know all", seconds=30)
        load.go_on(_ENOUGH)
    assert load.failed == []
    _record("API server stopped for 20 s", recovered, load)


def test_an_operator_whose_calls_are_refused_for_their_number_goes_on_once_they_are_not(
    llm: Llm, address: str, installed: Release
) -> None:
    _at(llm, 1, 1)
    first = faults.leader(installed)
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        with faults.too_many_requests(installed) as refused:
            llm.scale("prefill", 2)
            llm.wait(lambda: refused() > 0, "the API server says 429", seconds=_SLACK_SECONDS)
            load.go_on(_ENOUGH)
            assert llm.counts() == (1, 1), "its calls are not refused"
        began = time.monotonic()
        llm.wait(lambda: llm.has(2, 1), "the operator goes on", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - began
        load.go_on(_ENOUGH)
    assert load.failed == []
    _record("API server refuses the operator (429)", recovered, load, same_leader=faults.leader(installed) == first)


def test_requests_go_on_without_an_operator(llm: Llm, address: str, installed: Release) -> None:
    _at(llm, 1, 2)
    operators = ("deployment", installed.name, "--namespace", installed.system)
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        try:
            llm.cluster.kubectl("scale", *operators, "--replicas=0")
            llm.wait(lambda: faults.operators(installed) == 0, "no operator is left", seconds=60)
            faults.kill(llm.cluster, llm.pods("decode")[0].name, namespace=llm.namespace)
            load.go_on(5 * _ENOUGH)
            assert llm.counts() == (1, 1), "someone has replaced it"
        finally:
            llm.cluster.kubectl("scale", *operators, "--replicas=2")
        back = time.monotonic()
        llm.wait(lambda: llm.has(1, 2), "the operator replaces what was lost", seconds=_STARTED_SECONDS)
        recovered = time.monotonic() - back
        load.go_on(_ENOUGH)
    assert load.failed == []
    _record("operator gone", recovered, load)


def test_a_drained_node_loses_no_request_that_it_had(
    llm: Llm, address: str, components: Cluster, long_answer: str
) -> None:
    del components  # it has one node, so that nothing can move elsewhere
    _at(llm, 1, 1)
    node = llm.cluster.get("pod", llm.pods()[0].name, namespace=llm.namespace)["spec"]["nodeName"]
    routers = set(faults.routers(llm))
    streams = Streams(address, model=MODEL, right=long_answer, count=2, tokens=_LONG_TOKENS)
    llm.wait(lambda: sum(map(faults.in_flight, faults.routers(llm).values())) >= 2, "the streams run", seconds=30)
    engines = {pod.name for pod in llm.pods()}
    with _traffic(address) as load:
        load.go_on(_ENOUGH)
        began = time.monotonic()
        with faults.draining(llm.cluster, node, selector=f"kllm.io/service={llm.name}") as drain:
            llm.wait(lambda: _leave(llm, engines), "engines are told to leave", seconds=30)
            told_to_leave = time.monotonic()
            streams.join()
            assert streams.problems == []
            assert min(streams.ended) > told_to_leave, "the streams are too short to show anything"
            llm.wait(lambda: not engines & {pod.name for pod in llm.pods()}, "engines are gone", seconds=60)
            # The other router can only go once a new one is ready, which has no node to be on.
            assert len(set(faults.routers(llm)) & routers) == 1
            assert drain.poll() is None
            llm.cluster.kubectl("uncordon", node)
            uncordoned = time.monotonic()
            llm.wait(lambda: llm.has(1, 1), "there are engines again", seconds=_STARTED_SECONDS)
            llm.wait_for_condition("Ready", "True", seconds=_SLACK_SECONDS)
            served = time.monotonic()
            told, _ = drain.communicate(timeout=_STARTED_SECONDS)
            assert drain.returncode == 0, told
        load.go_on(_ENOUGH)
    assert not routers & set(faults.routers(llm))
    refused = load.failed
    assert [each for each in refused if each.ended < began or each.began > served] == []
    assert [each for each in refused if "status 503" not in each.error] == []
    assert [each for each in refused if each.ended - each.began > _REFUSED_SECONDS] == []
    _record(
        "node drained", served - uncordoned, load, refused=len(refused), drained_seconds=round(uncordoned - began, 1)
    )


def test_a_deleted_service_takes_all_that_is_its_and_nothing_else(llm: Llm) -> None:
    cluster, namespace = llm.cluster, llm.namespace
    none = {"minReplicas": 0, "maxReplicas": 1}
    other = manifest("other", prefill=none, decode=none, scaling="External")
    cluster.apply(other, namespace=namespace)
    neighbour = Llm(cluster, namespace, "other")
    neighbour.wait(lambda: bool(faults.routers(neighbour)), "the other's router is ready", seconds=_STARTED_SECONDS)
    its = faults.objects(cluster, namespace, labels=f"kllm.io/service={llm.name}")
    foreign = [_stranger(cluster.list(kind, namespace=namespace, labels=labels)[0]) for kind, labels in _LIKE]
    cluster.apply(*foreign, namespace=namespace)
    try:
        before = faults.objects(cluster, namespace)
        kept = before - its - {each for each in before if each[:2] == ("InferenceService", llm.name)}
        assert {("Pod", "stranger"), ("Deployment", "stranger"), ("Secret", "stranger")} <= {each[:2] for each in kept}
        began = time.monotonic()
        cluster.kubectl("delete", "llm", llm.name, "--wait=false", "--namespace", namespace)
        llm.wait(lambda: not faults.objects(cluster, namespace) & its, "all of it is gone", seconds=_GONE_SECONDS)
        seconds = time.monotonic() - began
        assert faults.objects(cluster, namespace) >= kept
    finally:
        for stranger in foreign:
            cluster.delete(f"{stranger['kind'].lower()}/stranger", namespace=namespace)
    faults.record("service deleted", {"seconds": round(seconds, 1), "objects": len(its), "others kept": len(kept)})


def _traffic(address: str) -> Traffic:
    return Traffic(address, MODEL, tokens=64)


def _at(llm: Llm, prefill: int, decode: int) -> None:
    """Bring the service to these counts."""
    llm.scale("prefill", prefill)
    llm.scale("decode", decode)
    llm.wait(lambda: llm.has(prefill, decode), f"{prefill} and {decode} instances", seconds=_STARTED_SECONDS)
    llm.wait(lambda: len(faults.routers(llm)) == 2, "two routers", seconds=_STARTED_SECONDS)


def _leave(llm: Llm, names: set[str]) -> bool:
    return not names & {pod.name for pod in llm.pods() if not pod.ending}


def _stranger(like: dict[str, Any]) -> dict[str, Any]:
    """An object of someone else with the labels of one of the service's."""
    metadata = {"name": "stranger", "labels": like["metadata"]["labels"]}
    made = {"apiVersion": like["apiVersion"], "kind": like["kind"], "metadata": metadata}
    container = {"name": "main", "image": "stranger"}
    match like["kind"]:
        case "Secret":
            return {**made, "stringData": {"token": "of someone else"}}
        case "Pod":
            # Nobody is to run it: that it is there is enough.
            return {**made, "spec": {"schedulerName": "nobody", "containers": [container]}}
        case _:
            labels = {"app": "stranger"}
            pods = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
            return {**made, "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pods}}


def _record(row: str, recovered: float, load: Traffic, **figures: Any) -> None:
    faults.record(row, {"recovered_seconds": round(recovered, 1), "requests": load.summary(), **figures})
