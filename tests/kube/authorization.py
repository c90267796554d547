"""What the operator's own role lets it do, for an API server in memory."""

from __future__ import annotations

from kllm_operator.kube.resources import Resource
from kllm_operator.render.permissions import ELECTION, OPERATOR

_GRANTS = {grant for rule in (*OPERATOR, *ELECTION) for grant in rule.grants()}
_NEEDED = {"apply": ("patch", "create"), "apply_status": ("patch",)}
"""Verbs of a call where they differ from its name: a server-side apply may make the object."""


def missing(verb: str, resource: Resource) -> set[tuple[str, str, str]]:
    """Grants, as (group, resource, verb), that a call of `KubeApi` needs and the operator's role does not have."""
    plural = f"{resource.plural}/status" if verb == "apply_status" else resource.plural
    return {(resource.group, plural, each) for each in _NEEDED.get(verb, (verb,))} - _GRANTS
