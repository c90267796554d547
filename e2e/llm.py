"""One InferenceService on a cluster: made, watched and asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.kube import CommandError, Kube

MODEL = "tiny"
_LOOK_SECONDS = 0.3
_READY_SECONDS = 180.0
_POOLS = {"prefill": "pp", "decode": "dp"}


def manifest(name: str, *, prefill: Mapping[str, Any], decode: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """A service of the smallest model, on no accelerator unless a role asks for one.

    Args:
        name: of the service.
        prefill: over a role's usual part.
        decode: the same.
        spec: other fields of the spec.
    """
    usual = {"accelerator": {"count": 0}, "engineArgs": {"context-length": 4096}}
    return {
        "apiVersion": "kllm.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "demo://tiny-random-llama", "name": MODEL},
            "objectives": {"ttftMilliseconds": 3000, "tpotMilliseconds": 100},
            "prefill": {**usual, **prefill},
            "decode": {**usual, **decode},
            **spec,
        },
    }


@dataclass(frozen=True)
class Pod:
    """What tests look at of an engine pod."""

    name: str
    uid: str
    role: str
    owner: str
    revision: str
    ready: bool
    ending: bool


@dataclass(frozen=True)
class Llm:
    """One service.

    Attributes:
        cluster: where it is.
        namespace: its namespace.
        name: its name.
    """

    cluster: Kube
    namespace: str
    name: str

    def document(self) -> dict[str, Any]:
        """Its object."""
        return self.cluster.get("llm", self.name, namespace=self.namespace)

    def status(self) -> dict[str, Any]:
        """Its status; empty before the first."""
        status: dict[str, Any] = self.document().get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """One of its conditions; with an empty status as long as it was not told."""
        return condition(self.status(), kind)

    def pool(self, role: str) -> dict[str, Any]:
        """The object of a role's pool."""
        return self.cluster.get(_POOLS[role], f"{self.name}-{role}", namespace=self.namespace)

    def scale(self, role: str, count: int) -> None:
        """As a person does it."""
        what = f"{'prefillpool' if role == 'prefill' else 'decodepool'}/{self.name}-{role}"
        self.cluster.kubectl("scale", what, f"--replicas={count}", "--namespace", self.namespace)

    def change(self, spec: Mapping[str, Any]) -> None:
        """Change fields of its spec, by a merge patch."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl(
            *("patch", "llm", self.name, "--type=merge", f"--patch={patch}", "--namespace", self.namespace)
        )

    def annotate(self, *annotations: str) -> None:
        """Set annotations (`key=value`), or remove them (`key-`)."""
        self.cluster.kubectl("annotate", "llm", self.name, *annotations, "--overwrite", "--namespace", self.namespace)

    def pods(self, role: str | None = None) -> list[Pod]:
        """Its engine pods that have not ended."""
        labels = f"kllm.io/service={self.name},app.kubernetes.io/component=engine"
        if role is not None:
            labels += f",kllm.io/role={role}"
        found = self.cluster.list("pods", namespace=self.namespace, labels=labels)
        return [_pod(each) for each in found if each["status"].get("phase") not in {"Succeeded", "Failed"}]

    def counts(self) -> tuple[int, int]:
        """Ready engine pods that are not on their way out: prefill, decode."""
        pods = [each for each in self.pods() if each.ready and not each.ending]
        return sum(each.role == "prefill" for each in pods), sum(each.role == "decode" for each in pods)

    def has(self, prefill: int, decode: int) -> bool:
        """Whether it has exactly these engine pods, all ready, and its status says so."""
        if len(self.pods()) != prefill + decode or self.counts() != (prefill, decode):
            return False
        status = self.status()
        return (status["prefill"]["ready"], status["decode"]["ready"]) == (prefill, decode)

    def events(self, reason: str) -> list[dict[str, Any]]:
        """Events of its namespace with this reason, the oldest first."""
        found = self.cluster.list("events.v1.events.k8s.io", namespace=self.namespace)
        return sorted((each for each in found if each["reason"] == reason), key=lambda each: each["eventTime"] or "")

    def wait(self, is_so: Callable[[], bool], what: str, *, seconds: float) -> float:
        """Look until it is so; seconds that it took."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"not within {seconds:.0f} s: {what}; {self._described()}")
            time.sleep(_LOOK_SECONDS)
        return time.monotonic() - began

    def wait_for_condition(self, kind: str, status: str, reason: str = "", *, seconds: float) -> dict[str, Any]:
        """A condition of its present generation, as soon as it is as told.

        Raises:
            AssertionError: it did not come to be.
        """
        found: dict[str, Any] = {}

        def is_so() -> bool:
            document = self.document()
            found.clear()
            found.update(condition(document.get("status", {}), kind))
            current = found.get("observedGeneration") == document["metadata"]["generation"]
            return current and found["status"] == status and reason in {"", found["reason"]}

        self.wait(is_so, f"{kind} is {status} {reason}", seconds=seconds)
        return dict(found)

    def _described(self) -> str:
        try:
            return json.dumps({"status": self.status(), "pods": [vars(each) for each in self.pods()]})
        except CommandError as error:
            return str(error)


@contextmanager
def serving(cluster: Kube, namespace: str, document: Mapping[str, Any]) -> Iterator[Llm]:
    """A service that is Ready, deleted in the end."""
    llm = Llm(cluster, namespace, document["metadata"]["name"])
    cluster.apply(document, namespace=namespace)
    try:
        cluster.wait(f"llm/{llm.name}", "condition=Ready", namespace=namespace, seconds=_READY_SECONDS)
        yield llm
    finally:
        cluster.delete(f"llm/{llm.name}", namespace=namespace)
        llm.wait(lambda: not llm.pods(), "its pods are gone", seconds=90)


@contextmanager
def reached(llm: Llm) -> Iterator[str]:
    """HOST:PORT of its routers."""
    with llm.cluster.reach(llm.name, 80, namespace=llm.namespace) as address:
        yield address


def condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """One condition of a status; with an empty status as long as it was not told."""
    told: list[dict[str, Any]] = status.get("conditions", [])
    return next((each for each in told if each["type"] == kind), {"status": "", "reason": "", "message": ""})


def _pod(document: Mapping[str, Any]) -> Pod:
    metadata = document["metadata"]
    conditions = document["status"].get("conditions", [])
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=metadata["labels"]["kllm.io/role"],
        owner=metadata["ownerReferences"][0]["name"],
        revision=metadata["labels"]["kllm.io/revision"],
        ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
        ending="deletionTimestamp" in metadata,
    )
