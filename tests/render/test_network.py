"""Network policies as a matrix: each allowed connection, and that nothing else is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render.engine_helpers import service
from render.service_helpers import CONFIG, NETWORK, OPERATOR, of_kind

from kllm_core import labels

ENGINE_PORTS = {"http": 30000, "agent": 7300, "bootstrap": 8998, "mooncake": 16000, "rank": 50000}
ROUTER_PORTS = {"http": 8000, "grpc": 8001}


def pod(component, *, of="chat", namespace="team"):
    return namespace, {labels.NAME: "kllm", labels.COMPONENT: component, labels.SERVICE: of}


PEERS = {
    "client": ("web", {"app": "shop"}),
    "router": pod("router"),
    "engine": pod("engine"),
    "operator": ("kllm-system", OPERATOR),
    "false operator": ("team", OPERATOR),
    "prometheus": ("monitoring", {"app": "prometheus"}),
    "other service's router": pod("router", of="other"),
    "other service's engine": pod("engine", of="other"),
    "router of the same name elsewhere": pod("router", namespace="elsewhere"),
}


def matches(peer, namespace, has, *, own_namespace="team"):
    """As Kubernetes reads a NetworkPolicyPeer."""
    if "namespaceSelector" in peer:
        wanted = peer["namespaceSelector"].get("matchLabels", {})
        if not wanted.items() <= {"kubernetes.io/metadata.name": namespace}.items():
            return False
    elif namespace != own_namespace:
        return False
    return peer.get("podSelector", {}).get("matchLabels", {}).items() <= has.items()


def allowed(policies, target, peer, port):
    namespace, has = peer
    for policy in policies:
        spec = policy["spec"]
        if not spec["podSelector"]["matchLabels"].items() <= target[1].items():
            continue
        for rule in spec["ingress"]:
            inside = any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
            if inside and ("from" not in rule or any(matches(each, namespace, has) for each in rule["from"])):
                return True
    return False


def matrix(target, ports, served=None, network=NETWORK):
    policies = of_kind("NetworkPolicy", served, replace(CONFIG, network=network))
    return {
        name: {port for port, number in ports.items() if allowed(policies, pod(target), peer, number)}
        for name, peer in PEERS.items()
    }


def test_engines_are_reached_by_those_who_need_them_at_the_ports_that_they_need():
    assert matrix("engine", ENGINE_PORTS) == {
        "client": set(),
        "router": {"http", "agent"},
        "engine": {"bootstrap", "mooncake", "rank"},
        "operator": {"agent"},
        "false operator": set(),
        "prometheus": {"http"},
        "other service's router": set(),
        "other service's engine": set(),
        "router of the same name elsewhere": set(),
    }


def test_routers_are_reached_by_everyone_unless_clients_are_named():
    assert set(map(frozenset, matrix("router", ROUTER_PORTS).values())) == {frozenset({"http", "grpc"})}


def test_named_clients_are_the_only_ones():
    clients = ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "web"}}},)
    reached = matrix("router", ROUTER_PORTS, network=replace(NETWORK, clients=clients))

    assert {name: ports for name, ports in reached.items() if ports} == {
        "client": {"http", "grpc"},
        "operator": {"grpc"},
        "prometheus": {"http"},
    }


def test_nobody_reads_metrics_unless_someone_is_named():
    reached = matrix("engine", ENGINE_PORTS, network=replace(NETWORK, metrics=()))

    assert reached["prometheus"] == set()


@pytest.mark.parametrize(("backend", "ports"), [("Mooncake", {15000, 17000, 49152, 65535}), ("NIXL", {32768, 65535})])
def test_the_transfer_backend_decides_which_ports_engines_open_to_each_other(backend, ports):
    served = service(transferBackend=backend)
    policies = of_kind("NetworkPolicy", served)

    for port in ports:
        assert allowed(policies, pod("engine"), PEERS["engine"], port)
    assert not allowed(policies, pod("engine"), PEERS["engine"], min(ports) - 1)


@given(port=st.integers(1, 65535))
def test_strangers_reach_engines_at_no_port_at_all(port):
    policies = of_kind("NetworkPolicy")

    for name in ("client", "false operator", "other service's router", "other service's engine"):
        assert not allowed(policies, pod("engine"), PEERS[name], port)


def test_only_what_comes_in_is_restricted():
    for policy in of_kind("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_without_a_network_configuration_there_are_no_policies():
    assert of_kind("NetworkPolicy", config=replace(CONFIG, network=None)) == []
