"""Calls of kubectl, which knows contexts, logins and proxies."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from kllm.kubectl.exceptions import KubectlError, NotFoundError

Document = dict[str, Any]

SERVICES = "inferenceservices.kllm.io"
"""With its group, since other projects have kinds of that name."""
PODS = "pods"

_REQUEST_SECONDS = 15
_CALL_SECONDS = 60.0
"""For a whole call; logins and long lists included."""


@dataclass(frozen=True)
class Kubectl:
    """One cluster, and the namespace that is meant.

    Attributes:
        namespace: None takes the context's.
        all_namespaces: lists go over all of them.
        context: None takes the current one.
        kubeconfig: None takes kubectl's default.
    """

    namespace: str | None = None
    all_namespaces: bool = False
    context: str | None = None
    kubeconfig: str | None = None

    def inside(self, namespace: str) -> Kubectl:
        """The same cluster, and this namespace only."""
        return replace(self, namespace=namespace, all_namespaces=False)

    def get(self, kinds: str, name: str) -> Document:
        """One object.

        Raises:
            NotFoundError: it is not there.
            KubectlError: kubectl failed.
        """
        return self._json("get", kinds, name, "--output=json", *self._where())

    def list(self, kinds: str, *, selector: str = "") -> list[Document]:
        """All objects of these kinds in the namespace, or in all of them.

        Raises:
            KubectlError: kubectl failed.
        """
        where = ("--all-namespaces",) if self.all_namespaces else self._where()
        found = self._json("get", kinds, "--output=json", *where, *((f"--selector={selector}",) if selector else ()))
        items = found.get("items")
        if not isinstance(items, list):
            raise KubectlError(f"kubectl gave no list of {kinds}")
        return items

    def annotate(self, kinds: str, name: str, annotation: str) -> None:
        """Set KEY=VALUE, or remove KEY-.

        Raises:
            NotFoundError: it is not there.
            KubectlError: kubectl failed.
        """
        self._run("annotate", kinds, name, annotation, "--overwrite", *self._where())

    def raw(self, path: str) -> Document:
        """What the API server answers at a path.

        Raises:
            KubectlError: kubectl failed, or the answer is no JSON object.
        """
        return self._json("get", "--raw", path)

    def _where(self) -> tuple[str, ...]:
        return () if self.namespace is None else (f"--namespace={self.namespace}",)

    def _json(self, *arguments: str) -> Document:
        text = self._run(*arguments)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubectlError(f"kubectl {arguments[0]} gave no JSON object: {text[:200]!r}")
        return found

    def _run(self, *arguments: str) -> str:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError("kubectl is not on PATH")
        flags = [f"--request-timeout={_REQUEST_SECONDS}s"]
        flags += [] if self.context is None else [f"--context={self.context}"]
        flags += [] if self.kubeconfig is None else [f"--kubeconfig={self.kubeconfig}"]
        try:
            done = subprocess.run(
                [program, *arguments, *flags], capture_output=True, text=True, timeout=_CALL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {arguments[0]} took over {_CALL_SECONDS:g} s") from None
        except OSError as error:
            raise KubectlError(f"{program} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            raise _failure(done.stderr)
        return done.stdout


def _failure(said: str) -> KubectlError:
    lines = [line for line in said.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else "kubectl failed and said nothing"
    if "(NotFound)" in text:
        return NotFoundError(text)
    if "doesn't have a resource type" in text:
        return KubectlError("this cluster does not know kLLM's kinds: install the chart first")
    return KubectlError(text)
