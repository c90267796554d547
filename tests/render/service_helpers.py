"""Services, configurations and views of what is rendered for them, for the tests of a service's objects."""

from __future__ import annotations

import itertools

from render.engine_helpers import service

from kllm_operator.render.config import NetworkConfig, RenderConfig, RouterConfig
from kllm_operator.render.engine import EngineConfig
from kllm_operator.render.service import children, fleet_token

UID = "0f0c3c3e-6d2b-4f4e-9d52-8d1a8f5d8a11"
TOKEN = "a-token-that-is-long-enough"
OPERATOR = {"app.kubernetes.io/name": "kllm", "app.kubernetes.io/component": "operator"}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
NETWORK = NetworkConfig("kllm-system", OPERATOR, metrics=(MONITORING,))
CONFIG = RenderConfig(
    EngineConfig("example.test/kllm/engine:1"), RouterConfig("example.test/kllm/router:1"), NETWORK
)  # fmt: skip

URIS = ("demo://smollm2-135m", "hf://org/name@main", "pvc://weights/llama", "/models/llama")


def documents(served=None, config=CONFIG, *, uid=UID):
    """All objects of a service, its token last."""
    served = served or service()
    return [*children(served, uid=uid, config=config), fleet_token(served, uid=uid, token=TOKEN)]


def of_kind(kind, served=None, config=CONFIG):
    return [each for each in documents(served, config) if each["kind"] == kind]


def router_pod(served=None, config=CONFIG):
    (deployment,) = of_kind("Deployment", served, config)
    return deployment["spec"]["template"]


def flags(container):
    """Flags of a container with their values."""
    words = container["args"]
    return {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}
