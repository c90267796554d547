"""Laws by the names that the command line takes. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kllm.sim.laws.aibrix import Aibrix, AibrixSettings
from kllm.sim.laws.base import Law, Pool, Setup
from kllm.sim.laws.clairvoyant import Clairvoyant, ClairvoyantSettings
from kllm.sim.laws.dynamo import Dynamo, DynamoSettings
from kllm.sim.laws.hpa import Hpa, HpaSettings
from kllm.sim.laws.kthena import Kthena, KthenaSettings
from kllm.sim.laws.llm_d import LlmD, LlmDSettings
from kllm.sim.laws.static import Static
from kllm.sim.laws.token_aware import TokenAware, TokenAwareSettings
from kllm.sim.laws.wva import Wva, WvaSettings

Knobs = Mapping[str, object]


@dataclass(frozen=True)
class _Entry:
    help: str
    settings: type[Any]
    law: Callable[[Setup, Any], Law]


_ENTRIES = {
    "hpa": _Entry("Kubernetes HorizontalPodAutoscaler on requests per engine", HpaSettings, Hpa),
    "llm-d": _Entry("llm-d's SLO-aware loop", LlmDSettings, LlmD),
    "llm-d-token-aware": _Entry("llm-d's loop on queued tokens and KV use", TokenAwareSettings, TokenAware),
    "llm-d-wva": _Entry("llm-d's workload variant autoscaler (saturation)", WvaSettings, Wva),
    "dynamo": _Entry("Dynamo's SLA planner", DynamoSettings, Dynamo),
    "aibrix": _Entry("AIBrix's PodAutoscaler, APA or KPA", AibrixSettings, Aibrix),
    "kthena": _Entry("kthena's disaggregated target with a ratio bound", KthenaSettings, Kthena),
    "clairvoyant": _Entry("the least counts of a law that knows every arrival", ClairvoyantSettings, Clairvoyant),
}

POLICIES: Mapping[str, str] = {
    "static": "fixed counts, static:P,D or static:N",
    **{name: entry.help for name, entry in _ENTRIES.items()},
}
"""Names with one line of help each."""


def build(policy: str, setup: Setup, knobs: Knobs | None = None) -> Law:
    """A new law for one run.

    Args:
        policy: its name; `static` with its counts, as in `static:2,3` (prefill and decode) or `static:4`.
        setup: what the law is told.
        knobs: settings other than the defaults, as values or as text.

    Raises:
        ValueError: there is no such law or knob, or a value doesn't fit; the message names it.
    """
    name, _, counts = policy.partition(":")
    if name == "static":
        if knobs:
            raise ValueError(f"static has no knobs, got {', '.join(knobs)}")
        return Static(_static_counts(policy, counts, setup))
    entry = _ENTRIES.get(name)
    if entry is None or counts:
        raise ValueError(f"there is no policy {policy!r}; known are {', '.join(POLICIES)}")
    return entry.law(setup, _settings(name, entry.settings, knobs or {}))


def _static_counts(policy: str, counts: str, setup: Setup) -> dict[Pool, int]:
    pools = [pool for pool in Pool if pool in setup.bounds]
    parts = counts.split(",")
    if len(parts) != len(pools) or not all(part.strip().isdecimal() for part in parts):
        form = "static:N" if pools == [Pool.ONE] else "static:P,D"
        raise ValueError(f"the policy must have the form {form} with whole numbers, got {policy!r}")
    return dict(zip(pools, map(int, parts), strict=True))


def _settings(name: str, kind: type[Any], knobs: Knobs) -> object:
    defaults = {each.name: getattr(kind(), each.name) for each in fields(kind)}
    unknown = [knob for knob in knobs if knob not in defaults]
    if unknown:
        raise ValueError(f"{name} has no knob {', '.join(unknown)}; it has {', '.join(defaults)}")
    return kind(**{knob: _fitted(name, knob, value, defaults[knob]) for knob, value in knobs.items()})


def _fitted(name: str, knob: str, value: object, default: object) -> object:
    """A knob's value in the type of its default."""
    text = str(value).strip()
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, enum.Enum):
            return type(default)(text)
        if isinstance(default, int):
            return int(text)
        return float(text)
    except (KeyError, ValueError):
        known = f": {', '.join(type(default))}" if isinstance(default, enum.StrEnum) else ""
        raise ValueError(f"{name}: {knob} must be of the kind of {default!s}{known}, got {value!r}") from None
