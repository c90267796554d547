"""What is served: the address of a model, and the name that clients give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kllm_core.kinds.base import Part
from kllm_core.kinds.rules import Rule, unchangeable

DEMO_MODELS = ("smollm2-135m", "tiny-random-llama")

_HUB = "^hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_./-]+)?$"
_CLAIM = "^pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/[A-Za-z0-9_.@+-]+)*/?$"
_DEMO = [f"demo://{name}" for name in DEMO_MODELS]
_SCHEMES = ("hf://", "pvc://", "demo://")

_URI_RULES = (
    Rule(
        cel=f"self.startsWith('/') || {list(_SCHEMES)}.exists(each, self.startsWith(each))",
        message="a model is hf://ORG/NAME[@REVISION], pvc://CLAIM[/PATH], demo://NAME or an absolute folder",
        holds=lambda uri: uri.startswith(("/", *_SCHEMES)),
    ),
    Rule(
        cel=f"!self.startsWith('hf://') || self.matches('{_HUB}')",
        message="an hf:// address is hf://ORG/NAME or hf://ORG/NAME@REVISION",
        holds=lambda uri: not uri.startswith("hf://") or re.fullmatch(_HUB, uri) is not None,
    ),
    Rule(
        cel=f"!self.startsWith('pvc://') || self.matches('{_CLAIM}')",
        message="a pvc:// address is pvc://CLAIM or pvc://CLAIM/PATH, with A-Z, a-z, 0-9 and _.@+- in the path",
        holds=lambda uri: not uri.startswith("pvc://") or re.fullmatch(_CLAIM, uri) is not None,
    ),
    Rule(
        cel=f"!self.startsWith('demo://') || self in {_DEMO}",
        message=f"unknown demo model; there are {', '.join(DEMO_MODELS)}",
        holds=lambda uri: not uri.startswith("demo://") or uri in _DEMO,
    ),
    Rule(
        cel="!self.contains('/../') && !self.endsWith('/..')",
        message="a path must not contain '..'",
        holds=lambda uri: "/../" not in uri and not uri.endswith("/.."),
    ),
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        claim: name of the persistent volume claim; empty unless kind is pvc.
        path: pvc: folder within the volume without a leading slash, empty for its root; folder: the absolute path;
            hf: ORG/NAME[@REVISION]; demo: its name.
    """

    kind: Literal["hf", "demo", "pvc", "folder"]
    path: str
    claim: str = ""


class ModelSpec(Part):
    """What is served."""

    uri: Annotated[
        str,
        StringConstraints(min_length=1, max_length=1024),
        *_URI_RULES,
        unchangeable("model.uri", "instances with the old and the new weights would pair while it is rolled out"),
    ] = Field(
        description="hf://ORG/NAME[@REVISION], pvc://CLAIM[/PATH], demo://smollm2-135m, or an absolute folder (of the "
        "node, on Kubernetes) with config and safetensors. It cannot be changed.",
    )
    name: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253),
        unchangeable("model.name", "clients ask for the model by it"),
    ] = Field(description="Name that clients give in `model`. It cannot be changed.")

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        scheme, _, rest = self.uri.rpartition("://")
        match scheme:
            case "hf" | "demo":
                return ModelSource(scheme, rest)
            case "pvc":
                claim, _, path = rest.partition("/")
                return ModelSource("pvc", path.rstrip("/"), claim)
            case _:
                return ModelSource("folder", self.uri)
