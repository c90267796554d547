"""The spec that was accepted last, where the next leader finds it. Pure.

A spec that is refused leaves the one before it in force, and the API server keeps no old specs. The pools hold only
their own part of it: budget, scaling, routers and rollout are in neither of them. So the whole of it stands in an
annotation of the prefill pool, which the service owns and which is written anyway when the spec changes; an object of
its own would be one more kind to watch and to allow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kllm_core.kinds.manifest import ManifestError, check_service
from kllm_core.kinds.service import InferenceService
from kllm_core.labels import ACCEPTED_SPEC

MOST_BYTES = 128 * 1024
"""Half of what Kubernetes allows for all annotations of one object together."""


def kept(service: InferenceService) -> dict[str, str]:
    """The annotation that holds a service's spec.

    Raises:
        ManifestError: the spec is too large for it.
    """
    text = json.dumps(service.spec.document(), sort_keys=True, separators=(",", ":"))
    if len(text.encode()) > MOST_BYTES:
        problem = f"spec: has {len(text.encode())} bytes as JSON, and may have {MOST_BYTES}; shorten its templates"
        raise ManifestError("manifest", [problem])
    return {ACCEPTED_SPEC: text}


def recalled(pool: Mapping[str, Any], document: Mapping[str, Any]) -> InferenceService | None:
    """The service as it was last accepted; None if its pool does not tell.

    Args:
        pool: its prefill pool.
        document: its object as it is, with a spec that is refused.

    Raises:
        ManifestError: what the pool tells is no spec that this operator accepts.
    """
    text = (pool["metadata"].get("annotations") or {}).get(ACCEPTED_SPEC)
    if text is None:
        return None
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(ACCEPTED_SPEC, ["is not JSON"]) from error
    return check_service({**document, "spec": spec}, source=ACCEPTED_SPEC)
