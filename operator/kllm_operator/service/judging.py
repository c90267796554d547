"""Whether a standalone pool can be carried out, by itself and beside the others of its service. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kllm_core.conditions import Reason
from kllm_core.kinds.manifest import ManifestError, check_pool
from kllm_core.kinds.pools import DecodePool, PrefillPool
from kllm_core.kinds.service import InferenceService
from kllm_core.labels import SERVICE
from kllm_operator.render.engine import EngineConfig, engine_revision
from kllm_operator.render.engine_template import TemplateError
from kllm_operator.render.standalone import half_of
from kllm_operator.service.facts import Verdict
from kllm_operator.service.standalone import asked_service, present_service, role_of

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
"""Names of pods, of the account and of the secret begin with it."""


def judged(
    document: Mapping[str, Any], config: EngineConfig, *, older: Sequence[Mapping[str, Any]], is_taken: bool
) -> tuple[Verdict, InferenceService | None]:
    """The verdict, and what it is carried out as if it was accepted.

    Args:
        document: the pool's object.
        config: the operator's part of its pods.
        older: standalone pools of the same service that were there before it.
        is_taken: an InferenceService has that service's name.
    """
    role = role_of(document)
    try:
        pool = check_pool(dict(document))
        refused = next(_refusals(document, pool, older=older, is_taken=is_taken), None)
        if refused is not None:
            return refused, None
        half = half_of(asked_service(document)[1], pool)
        engine_revision(half, config, role)
    except ManifestError as error:
        return Verdict(False, Reason.INVALID_SPEC, "; ".join(error.problems)), None
    except TemplateError as error:
        # Its template stands where a service has one for each role.
        return Verdict(False, Reason.TEMPLATE_REFUSED, str(error).replace(f"spec.{role}.", "spec.", 1)), None
    return Verdict(), half


def _refusals(
    document: Mapping[str, Any], pool: PrefillPool | DecodePool, *, older: Sequence[Mapping[str, Any]], is_taken: bool
) -> Iterator[Verdict]:
    (namespace, name), present = asked_service(document), present_service(document)
    label = f"metadata.labels: {SERVICE}"
    if present is not None and present != (namespace, name):
        yield Verdict(
            False, Reason.INVALID_SPEC,
            f"{label} cannot be changed from {present[1]} to {name}: delete the pool and make another one",
        )  # fmt: skip
    if _NAME.fullmatch(name) is None:
        yield Verdict(
            False, Reason.INVALID_SPEC,
            f"{label} must be at most 48 of a-z, 0-9 and '-', begin with a letter and not end with '-', got {name!r}",
        )  # fmt: skip
    if is_taken:
        yield Verdict(
            False, Reason.NAME_TAKEN,
            f"there is an InferenceService {name}, which has pools of its own: name another service by {label}",
        )  # fmt: skip
    for other in older:
        yield from _clashes(pool, other)


def _clashes(pool: PrefillPool | DecodePool, other: Mapping[str, Any]) -> Iterator[Verdict]:
    """Why a pool cannot be in one service with another one that was there before it."""
    who = f"{other['kind']} {other['metadata']['name']} of the same service"
    if other["kind"] == pool.kind:
        yield Verdict(
            False, Reason.NAME_TAKEN,
            f"there is {who}, which has one pool of each role: delete one of them, or name another service by "
            f"metadata.labels: {SERVICE}",
        )  # fmt: skip
    try:
        theirs = check_pool(dict(other)).spec
    except ManifestError:
        return
    mine = pool.spec
    agreed = {
        "spec.model.uri": (mine.model.uri, theirs.model.uri),
        "spec.model.name": (mine.model.name, theirs.model.name),
        "spec.cache.pageSize": (mine.cache.page_size, theirs.cache.page_size),
        "spec.cache.kvType": (mine.cache.kv_type, theirs.cache.kv_type),
        "spec.transferBackend": (mine.transfer_backend, theirs.transfer_backend),
    }
    told = [f"{field} is {here} here and {there} in {who}" for field, (here, there) in agreed.items() if here != there]
    if told:
        yield Verdict(False, Reason.INVALID_SPEC, f"{'; '.join(told)}: their instances could not pair")
