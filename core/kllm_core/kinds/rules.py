"""Rules of manifests, each written once: what the API server evaluates, what the models check, what people read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

VALIDATIONS = "x-kubernetes-validations"


@dataclass(frozen=True)
class Rule:
    """A rule of one part or field: annotates a field, or stands among the `rules` of a part.

    Attributes:
        cel: the rule in CEL over `self`. Defaults are filled in before it is evaluated.
        message: what must hold, and the fix where it is not plain.
        holds: the same over the model's value; None for a rule about a change, of which only the API server sees both
            sides (`self` and `oldSelf`).
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None

    @property
    def validation(self) -> dict[str, str]:
        """Its item in a schema's list of validations."""
        return {"rule": self.cel, "message": self.message}

    def check(self, value: Any) -> Any:
        """The value, if the rule holds.

        Raises:
            ValueError: it does not.
        """
        if self.holds is not None and not self.holds(value):
            raise ValueError(self.message)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        told = handler(schema)
        return told | {VALIDATIONS: [*told.get(VALIDATIONS, ()), self.validation]}


def unchangeable(name: str, why: str) -> Rule:
    """A field that keeps the value that it was made with."""
    return Rule(cel="self == oldSelf", message=f"{name} cannot be changed: {why}; make another one")
