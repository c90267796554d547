"""What the operator knows beside a service when it renders: images, programs, who may call whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kllm_operator.render.engine import EngineConfig


@dataclass(frozen=True)
class RedisConfig:
    """Where routers of a service tell each other what they have in flight: one of the two.

    Attributes:
        url: without user and password.
        secret_name: of a secret in the service's namespace; routers start without it, too.
        secret_key: under which it holds the URL.
    """

    url: str | None = None
    secret_name: str | None = None
    secret_key: str = "url"  # noqa: S105 - a name


@dataclass(frozen=True)
class RouterConfig:
    """What the operator adds to each router's pod.

    Attributes:
        image: of the router.
        pull_policy: IfNotPresent, Always or Never.
        pull_secrets: names of secrets in the service's namespace.
        command: the router's program.
        template: pod template under that of services; None adds nothing.
        lame_duck_seconds: for which a router that is told to end still takes requests, until every node's proxy and
            every load balancer has heard of it.
        drain_seconds: that it then has for what it holds.
        workers: its processes.
        access_log: whether it logs each answer on standard output.
        redis: None shares nothing.
    """

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    command: tuple[str, ...] = ("kllm-router",)
    template: Mapping[str, Any] | None = None
    lame_duck_seconds: float = 5.0
    drain_seconds: float = 60.0
    workers: int = 1
    access_log: bool = False
    redis: RedisConfig | None = None


@dataclass(frozen=True)
class NetworkConfig:
    """Who is who for network policies.

    Attributes:
        operator_namespace: where the operator runs.
        operator_labels: that select its pods there.
        clients: NetworkPolicyPeers that may call routers; empty is everyone.
        metrics: NetworkPolicyPeers that may read metrics of routers and engines.
    """

    operator_namespace: str
    operator_labels: Mapping[str, str]
    clients: tuple[Mapping[str, Any], ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class RenderConfig:
    """All of it.

    Attributes:
        engine: engines' part; the router's pod fetches demo models with the engine's program.
        router: routers' part.
        network: None renders no network policies.
    """

    engine: EngineConfig
    router: RouterConfig
    network: NetworkConfig | None = None
