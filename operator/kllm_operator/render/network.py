"""Who may open connections to a service's pods. Pure.

| from | to | ports |
|---|---|---|
| clients | routers | HTTP, gRPC |
| operator | routers | gRPC (service levels, health) |
| metrics | routers, engines | HTTP |
| routers | engines | HTTP, agent |
| operator | engines | agent |
| engines | engines of the same service | bootstrap, transfer |

The kubelet's probes come from the pod's own node, which network policies never keep out. What pods may call is left
open: models come from addresses that only the cluster's administrators know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kllm_core import labels
from kllm_core.kinds.base import TransferBackend
from kllm_core.kinds.service import InferenceService
from kllm_operator.render.config import NetworkConfig
from kllm_operator.render.engine import AGENT_PORT, BOOTSTRAP_PORT, HTTP_PORT
from kllm_operator.render.objects import rendered, selector_of
from kllm_operator.render.router import GRPC_PORT as ROUTER_GRPC_PORT
from kllm_operator.render.router import HTTP_PORT as ROUTER_HTTP_PORT

_MOONCAKE_PORTS = (15000, 17000)
"""Each engine process takes two free ones of these, for handshakes and for KV over TCP; RDMA has no ports."""
_RANK_PORTS = (49152, 65535)
"""Each rank of an engine takes a free one, at which decode tells prefill where KV is to go."""
_UCX_PORTS = (32768, 65535)
"""NIXL's UCX takes whatever the kernel gives it; the ranks' ports are among these."""

_TRANSFER_PORTS: Mapping[TransferBackend, tuple[tuple[int, int], ...]] = {
    TransferBackend.MOONCAKE: (_MOONCAKE_PORTS, _RANK_PORTS),
    TransferBackend.NIXL: (_UCX_PORTS,),
}
"""First and last port. Engines choose among them at random as they start and tell each other through bootstrap, so that
only the range is known beforehand."""


def network_policies(service: InferenceService, config: NetworkConfig) -> list[dict[str, Any]]:
    """Of engines and of routers."""
    engines, routers = _own(service, labels.COMPONENT_ENGINE), _own(service, labels.COMPONENT_ROUTER)
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.operator_namespace}},
        "podSelector": {"matchLabels": dict(config.operator_labels)},
    }
    transfer = [(BOOTSTRAP_PORT, BOOTSTRAP_PORT), *_TRANSFER_PORTS[service.spec.transfer_backend]]
    to_engines = [
        _allow([routers], [(HTTP_PORT, HTTP_PORT), (AGENT_PORT, AGENT_PORT)]),
        _allow([engines], transfer),
        _allow([operator], [(AGENT_PORT, AGENT_PORT)]),
        *([_allow(config.metrics, [(HTTP_PORT, HTTP_PORT)])] if config.metrics else []),
    ]
    http, grpc = (ROUTER_HTTP_PORT, ROUTER_HTTP_PORT), (ROUTER_GRPC_PORT, ROUTER_GRPC_PORT)
    to_routers = [
        _allow(config.clients, [http, grpc]),
        _allow([operator], [grpc]),
        *([_allow(config.metrics, [http])] if config.metrics else []),
    ]
    return [
        _policy(service, labels.COMPONENT_ENGINE, to_engines),
        _policy(service, labels.COMPONENT_ROUTER, to_routers),
    ]


def _own(service: InferenceService, component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": selector_of(service, component)}}


def _allow(peers: Iterable[Mapping[str, Any]], ports: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """A rule; no peers are everyone."""
    given = [dict(peer) for peer in peers]
    return {"ports": [_range(*ends) for ends in ports]} | ({"from": given} if given else {})


def _range(first: int, last: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": first} | ({"endPort": last} if last > first else {})


def _policy(service: InferenceService, component: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return rendered(
        service,
        api_version="networking.k8s.io/v1",
        kind="NetworkPolicy",
        name=f"{service.name}-{component}",
        component=component,
        body={"spec": {**_own(service, component), "policyTypes": ["Ingress"], "ingress": rules}},
    )
