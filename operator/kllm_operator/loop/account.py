"""What a decision was weighed against, as JSON."""

from __future__ import annotations

from typing import Any

from kllm_core.objectives import Role
from kllm_operator.loop.events import load_document
from kllm_operator.plan.outlook import Outlook
from kllm_operator.plan.why import Alternative, RoleWhy, Why


def why_document(why: Why) -> dict[str, Any]:
    """For programs, and for `kllm explain`."""
    return {
        "roles": {each.role.value: _role(each) for each in why.roles},
        "cost": round(why.cost, 3),
        "alternatives": [_alternative(each) for each in why.alternatives],
        "outlook": None if why.outlook is None else _outlook(why.outlook),
        "burst": None if why.burst is None else why.burst.words,
    }


def _role(why: RoleWhy) -> dict[str, Any]:
    return {
        "before": why.before,
        "after": why.after,
        "needs": why.needs,
        "forecasts": [load_document(each) for each in why.forecasts],
        "held_seconds": None if why.held_seconds is None else round(why.held_seconds, 1),
        "patience_seconds": round(why.patience_seconds, 1),
    }


def _alternative(other: Alternative) -> dict[str, Any]:
    return {
        Role.PREFILL.value: other.prefill,
        Role.DECODE.value: other.decode,
        "cost": round(other.cost, 3),
        "loads": {
            role.value: None if load is None else round(load, 3) for role, load in zip(Role, other.loads, strict=True)
        },
    }


def _outlook(ahead: Outlook) -> dict[str, Any]:
    return {
        "seconds": round(ahead.seconds, 1),
        "quantile": ahead.quantile,
        "requests_per_second": round(ahead.level, 4),
        "expected_requests_per_second": round(ahead.expected, 4),
        "high_requests_per_second": {role.value: round(rate, 4) for role, rate in ahead.high.items()},
        "prompt_tokens": ahead.prompt_tokens,
        "cached_tokens": ahead.cached_tokens,
        "output_tokens": ahead.output_tokens,
    }
