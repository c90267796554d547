"""Services and configurations for the tests of instances' pods."""

from __future__ import annotations

import kubernetes_validate

from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Role
from kllm_operator.render.engine import EngineConfig, engine_pod
from kllm_operator.render.owner import Owner

P, D = Role.PREFILL, Role.DECODE
CONFIG = EngineConfig(image="example.test/kllm/engine:1")
OWNER = Owner("kllm.io/v1alpha1", "PrefillPool", "chat-prefill", "8a1f")


def service(uri="demo://smollm2-135m", *, prefill=None, decode=None, **spec):
    return check_service(
        {
            "apiVersion": "kllm.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "team"},
            "spec": {
                "model": {"uri": uri, "name": "smollm2"},
                "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
                "prefill": prefill or {},
                "decode": decode or {},
                **spec,
            },
        }
    )


def pod(served=None, config=CONFIG, *, pool=P, slot=False, name="chat-engine-x2x4f"):
    made = engine_pod(served or service(), config, name=name, pool=pool, slot=slot, owner=OWNER)
    kubernetes_validate.validate(made, "1.34", strict=True)
    return made


def named(items, name, key="name"):
    return next(item for item in items if item[key] == name)


def engine(made):
    return named(made["spec"]["containers"], "engine")


def arguments(made):
    """Flags of the agent, with their values; those without one have None."""
    found, name = {}, None
    for word in engine(made)["args"][1:]:
        if word.startswith("--"):
            found[name := word] = None
        else:
            found[name] = word
    return found
