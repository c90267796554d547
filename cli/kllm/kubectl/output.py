"""Output for programs: -o json and yaml."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import Any

from pydantic import BaseModel

from kllm.kubectl.forms import Output
from kllm.kubectl.services import Instance, Service


def print_told(told: dict[str, Any] | list[dict[str, Any]], output: Output) -> None:
    """Print a document, or a list of them, as JSON or YAML."""
    if output is Output.JSON:
        print(json.dumps(told, indent=1))
        return
    import yaml  # noqa: PLC0415 - only YAML needs it

    print(yaml.safe_dump(told, sort_keys=False), end="")


def document(value: Service | Instance) -> dict[str, Any]:
    """It as JSON."""
    fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {name: _plain(each) for name, each in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return value.isoformat() if isinstance(value, dt.datetime) else value
