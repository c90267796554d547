"""What the operator and routers may do at the API server. Pure.

Roles of routers are rendered from it, and those of the chart are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kllm_core.labels import GROUP

_READ = ("get", "list", "watch")
_KEEP = (*_READ, "create", "patch", "delete")


@dataclass(frozen=True)
class Rule:
    """Verbs on resources of one API group; the core group is empty."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As a rule of a Role."""
        return {"apiGroups": [self.group], "resources": list(self.resources), "verbs": list(self.verbs)}

    def grants(self) -> Iterator[tuple[str, str, str]]:
        """One (group, resource, verb) at a time."""
        for resource in self.resources:
            for verb in self.verbs:
                yield self.group, resource, verb


ROUTER = (Rule("", ("pods",), _READ),)
"""A router lists the instances of its service; labels cannot narrow what a Role grants."""

OPERATOR = (
    Rule(GROUP, ("inferenceservices",), _READ),
    Rule(GROUP, ("prefillpools", "decodepools"), _KEEP),
    Rule(GROUP, ("inferenceservices/status", "prefillpools/status", "decodepools/status"), ("patch",)),
    # Owner references that block the owner's deletion need it where admission checks them.
    Rule(GROUP, ("inferenceservices/finalizers", "prefillpools/finalizers", "decodepools/finalizers"), ("update",)),
    # The operator may grant no more than it has: what ROUTER holds is here as well.
    Rule("", ("pods",), _KEEP),
    Rule("", ("services", "serviceaccounts"), _KEEP),
    # The fleet token of each service is made once and read by its name; secrets are never listed.
    Rule("", ("secrets",), ("get", "create")),
    Rule("apps", ("deployments",), _KEEP),
    Rule("policy", ("poddisruptionbudgets",), _KEEP),
    Rule("networking.k8s.io", ("networkpolicies",), _KEEP),
    Rule("rbac.authorization.k8s.io", ("roles", "rolebindings"), _KEEP),
    # Why a pod hangs before it runs is told in events only.
    Rule("events.k8s.io", ("events",), ("list", "create")),
)
"""In every namespace whose services it keeps."""

ELECTION = (Rule("coordination.k8s.io", ("leases",), ("get", "create", "patch")),)
"""In the operator's own namespace."""

DEFINITIONS = (Rule("apiextensions.k8s.io", ("customresourcedefinitions",), ("get", "create", "patch")),)
"""Of the job that brings the kinds up to date; never the operator's."""
