"""SGLang arguments in manifests: which names there can be, and which kLLM keeps to itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from kllm_core.kinds.rules import VALIDATIONS, Rule

RESERVED_ENGINE_ARGS = frozenset(
    {
        "api-key", "admin-api-key", "device", "disaggregation-bootstrap-port", "disaggregation-mode",
        "disaggregation-transfer-backend", "enable-metrics", "enable-pd-role-switch", "grpc-port", "grpc-mode", "host",
        "kv-cache-dtype", "kv-events-config", "model", "model-path", "nccl-port", "optimistic-prefill-attempts",
        "page-size", "port", "served-model-name", "smg-grpc-mode", "tokenizer-path",
    }
)  # fmt: skip
"""Arguments that follow from other fields; setting them twice could only disagree."""

PARALLEL_ENGINE_ARGS = frozenset(
    {
        "attention-context-parallel-size", "attn-cp-size", "data-parallel-size", "dp", "dp-size", "ep", "ep-size",
        "expert-parallel-size", "pipeline-parallel-size", "pp-size", "tensor-parallel-size", "tp", "tp-size",
    }
)  # fmt: skip
"""Arguments that `parallelism` makes; a manifest must not set them beside it."""

REFUSED_ENGINE_ARGS = RESERVED_ENGINE_ARGS | PARALLEL_ENGINE_ARGS
"""Arguments that a manifest must not set."""

_FLAGS = frozenset({"enable-metrics", "enable-pd-role-switch", "grpc-mode", "smg-grpc-mode"})
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_MOST = 128

EngineArgument = bool | int | float | str


def _refusal(name: str) -> Rule:
    # A rule that never holds, at the name itself: the API server then names the argument.
    source = "parallelism" if name in PARALLEL_ENGINE_ARGS else "other fields"
    return Rule(cel="false", message=f"engineArgs must not set '{name}': kLLM sets it from {source}")


def _scalar(value: object) -> EngineArgument:
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"must be text, a number, true or false, got {str(value)[:80]}")


def _checked(arguments: Mapping[str, EngineArgument]) -> Mapping[str, EngineArgument]:
    for name in arguments:
        if name in REFUSED_ENGINE_ARGS:
            raise ValueError(_refusal(name).message)
        if not _NAME.fullmatch(name):
            raise ValueError(f"engineArgs name {name!r} must be an SGLang argument without its leading dashes")
    return arguments


def _schema() -> dict[str, Any]:
    """Schema of the map.

    Values may be of any scalar type, for which structural schemas have no word; so the values of unknown names are
    carried as they are, and the operator checks them.
    """
    return {
        "type": "object",
        "maxProperties": _MOST,
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {name: _refused(name) for name in sorted(REFUSED_ENGINE_ARGS)},
    }


def _refused(name: str) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "boolean"} if name in _FLAGS else {"x-kubernetes-int-or-string": True}
    return kind | {"description": "Refused: kLLM sets it.", VALIDATIONS: [_refusal(name).validation]}


EngineArguments = Annotated[
    dict[str, Annotated[EngineArgument, PlainValidator(_scalar)]],
    Field(max_length=_MOST),
    AfterValidator(_checked),
    WithJsonSchema(_schema()),
]
"""SGLang arguments by name, without leading dashes."""
