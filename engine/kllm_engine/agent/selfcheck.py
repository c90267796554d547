"""Decides whether an engine that came up may serve. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Binding, Role
from kllm_engine.messages import Hello

ENGINE_VERSION = "0.5.21"
"""The hooks of the plugin were written against this version of SGLang."""


@dataclass(frozen=True)
class SelfCheck:
    """Outcome of the self-check.

    Attributes:
        refusals: why it must not serve, each naming what to change; empty when it may.
        bindings: what it can do.
        binding_reason: why Late is not among them.
    """

    refusals: tuple[str, ...]
    bindings: tuple[Binding, ...]
    binding_reason: str


def check(hello: Hello, *, role: Role, page_size: int) -> SelfCheck:
    """Compare what the engine says of itself with what was asked for."""
    refusals = [*_version(hello), *_hooks(hello), *_shape(hello, role, page_size), *_room(hello)]
    refusals += [problem for problem in hello.problems if problem not in refusals]
    if role is Role.DECODE or hello.optimistic_attempts > 0:
        return SelfCheck(tuple(refusals), (Binding.LATE, Binding.EARLY), "")
    reason = hello.binding_reason or "OptimisticPrefillOff"
    return SelfCheck(tuple(refusals), (Binding.EARLY,), f"BindingDegraded: {reason}")


def _version(hello: Hello) -> list[str]:
    if hello.engine_version == ENGINE_VERSION:
        return []
    return [f"SGLang is {hello.engine_version or 'unknown'}, this release needs {ENGINE_VERSION}: install that version"]


def _hooks(hello: Hello) -> list[str]:
    # The plugin names a hook that did not take among its problems too; once is enough.
    return [
        f"hook did not take: {target}"
        for target in hello.hooks_missing
        if not any(target in problem for problem in hello.problems)
    ]


def _shape(hello: Hello, role: Role, page_size: int) -> list[str]:
    refusals = []
    if hello.role != role.value:
        refusals.append(f"the engine runs as {hello.role}, {role.value} was asked for: check engine-args")
    if hello.page_size != page_size:
        refusals.append(f"page size is {hello.page_size}, {page_size} was asked for: check page-size in engine-args")
    return refusals


def _room(hello: Hello) -> list[str]:
    if hello.max_total_num_tokens >= hello.context_tokens:
        return []
    return [
        f"the KV pool holds {hello.max_total_num_tokens} tokens, one request may need {hello.context_tokens}, and a "
        "longer request than the pool would wait for ever: lower context-length, or raise max-total-tokens or "
        "mem-fraction-static"
    ]
