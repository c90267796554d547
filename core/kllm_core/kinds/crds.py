"""CustomResourceDefinitions out of the models: `python -m kllm_core.kinds.crds FOLDER`. `make generate` writes them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kllm_core import labels
from kllm_core.kinds.pools import DecodePool, PrefillPool
from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.structural import structural

_HEADER = "# Written by `make generate` out of core/kllm_core/kinds; change it there.\n"


@dataclass(frozen=True)
class Column:
    """One column of `kubectl get`.

    Attributes:
        wide: shown with `-o wide` only.
    """

    name: str
    path: str
    text: str
    kind: str = "string"
    wide: bool = False

    def document(self) -> dict[str, Any]:
        """As in a CustomResourceDefinition."""
        told: dict[str, Any] = {"name": self.name, "type": self.kind, "jsonPath": self.path, "description": self.text}
        return told | ({"priority": 1} if self.wide else {})


@dataclass(frozen=True)
class Definition:
    """One kind, as the API server is told of it."""

    model: type[BaseModel]
    plural: str
    short_name: str
    columns: tuple[Column, ...]
    scale: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{labels.GROUP}"

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{labels.GROUP}_{self.plural}.yaml"

    def document(self) -> dict[str, Any]:
        """The CustomResourceDefinition."""
        kind = self.model.__name__
        version: dict[str, Any] = {
            "name": labels.VERSION,
            "served": True,
            "storage": True,
            "additionalPrinterColumns": [column.document() for column in self.columns],
            "subresources": {"status": {}} | ({"scale": self.scale} if self.scale else {}),
            "schema": {"openAPIV3Schema": structural(self.model)},
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": self.name,
                "labels": {labels.NAME: labels.APPLICATION, labels.PART_OF: labels.APPLICATION},
            },
            "spec": {
                "group": labels.GROUP,
                "scope": "Namespaced",
                "names": {
                    "kind": kind,
                    "listKind": f"{kind}List",
                    "plural": self.plural,
                    "singular": kind.lower(),
                    "shortNames": [self.short_name],
                    "categories": [labels.APPLICATION],
                },
                "versions": [version],
            },
        }


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


_AGE = Column("Age", ".metadata.creationTimestamp", "Time since it was made.", "date")
_SERVICE_COLUMNS = (
    Column("Model", ".spec.model.name", "Name that clients give."),
    Column("Ready", _condition("Ready", "status"), "Whether the service answers."),
    Column("Prefill", ".status.prefill.ready", "Prefill instances that serve.", "integer"),
    Column("Decode", ".status.decode.ready", "Decode instances that serve.", "integer"),
    _AGE,
    Column("Reason", _condition("Ready", "reason"), "Why it is ready or not.", wide=True),
    Column("Scaling", ".spec.scaling", "Who writes the pools' replicas.", wide=True),
    Column("Paused", _condition("Paused", "status"), "Whether the operator only observes.", wide=True),
    Column("URL", ".status.url", "Where clients in the cluster reach it.", wide=True),
)
_POOL_COLUMNS = (
    Column("Desired", ".spec.replicas", "Instances wanted.", "integer"),
    Column("Ready", ".status.ready", "Instances that serve.", "integer"),
    Column("Warming", ".status.warming", "Instances that are starting.", "integer"),
    Column("Draining", ".status.draining", "Instances that finish what they have.", "integer"),
    Column("MilliLoad", ".status.load.valueMilli", "Load; 1000 is the boundary of the objective.", "integer"),
    _AGE,
    Column("Model", ".spec.model.name", "Name that clients give.", wide=True),
    Column("Slots", ".status.slots", "Slots that are ready to become an instance.", "integer", wide=True),
    Column("Advised", ".status.advised", "Under scaling External: what the planner advises.", "integer", wide=True),
)
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}

DEFINITIONS = (
    Definition(InferenceService, "inferenceservices", "llm", _SERVICE_COLUMNS),
    Definition(PrefillPool, "prefillpools", "pp", _POOL_COLUMNS, _SCALE),
    Definition(DecodePool, "decodepools", "dp", _POOL_COLUMNS, _SCALE),
)


def files() -> dict[str, str]:
    """Text of every CustomResourceDefinition, by the name of its file."""
    return {each.file: _HEADER + _text(each.document()) for each in DEFINITIONS}


def write(folder: Path) -> None:
    """Write all of them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - its signature is given
        return True


def _text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
