"""The two pools of a service, without their replica counts: those have writers of their own. Pure."""

from __future__ import annotations

from typing import Any

from kllm_core import labels
from kllm_core.kinds.pools import PoolSpec
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.render.accepted import kept
from kllm_operator.render.objects import rendered

_KINDS = {Role.PREFILL: "PrefillPool", Role.DECODE: "DecodePool"}


def pool(service: InferenceService, role: Role) -> dict[str, Any]:
    """The pool of one role; that of prefill also keeps what the service was last accepted as.

    Raises:
        ManifestError: the spec is too large for that.
    """
    spec = PoolSpec.of(service.spec, role).document()
    del spec["replicas"]
    document = rendered(
        service,
        api_version=labels.API_VERSION,
        kind=_KINDS[role],
        name=f"{service.name}-{role}",
        component=labels.COMPONENT_POOL,
        body={"spec": spec},
    )
    if role is Role.PREFILL:
        document["metadata"]["annotations"] = kept(service)
    return document
