"""The kinds that the operator reads or writes, and their paths. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kllm_core.labels import GROUP, VERSION

Document = dict[str, Any]
"""An object as the API server tells it."""

Documents = list[Document]


@dataclass(frozen=True)
class Resource:
    """One kind."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As manifests have it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """For people, logs and metrics: deployments.apps, pods."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, *, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Of a collection, or of one object.

        Args:
            namespace: None for all of them, and for kinds that are not in one.
            name: of the object; empty for the collection.
            subresource: of the object.

        Raises:
            ValueError: a part would lead elsewhere.
        """
        parts = ["", "apis", self.group, self.version] if self.group else ["", "api", self.version]
        parts += ["namespaces", _part(namespace)] if namespace is not None else []
        parts += [self.plural, *(_part(part) for part in (name, subresource) if part)]
        return "/".join(parts)


PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
SERVICES = Resource("", "v1", "services", "Service")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
INFERENCE_SERVICES = Resource(GROUP, VERSION, "inferenceservices", "InferenceService")
PREFILL_POOLS = Resource(GROUP, VERSION, "prefillpools", "PrefillPool")
DECODE_POOLS = Resource(GROUP, VERSION, "decodepools", "DecodePool")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)

CHILDREN = (
    PREFILL_POOLS, DECODE_POOLS, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, SERVICES, DEPLOYMENTS, DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
)  # fmt: skip
"""Kinds of objects that belong to a service, are watched, and are made again when they are gone or changed."""

WATCHED = (INFERENCE_SERVICES, *CHILDREN, PODS)
"""Kinds of which a cache is kept."""

_ALL = (*WATCHED, SECRETS, EVENTS, LEASES, CUSTOM_RESOURCE_DEFINITIONS)
_BY_KIND = {(each.api_version, each.kind): each for each in _ALL}


def resource_of(document: Mapping[str, Any]) -> Resource:
    """The kind of a manifest.

    Raises:
        ValueError: it is none of those above.
    """
    key = (str(document.get("apiVersion")), str(document.get("kind")))
    try:
        return _BY_KIND[key]
    except KeyError:
        raise ValueError(f"{key[1]} of {key[0]} is no kind that the operator handles") from None


def _part(text: str) -> str:
    if text in {"", ".", ".."}:
        raise ValueError(f"{text!r} is no name")
    return quote(text, safe="")
