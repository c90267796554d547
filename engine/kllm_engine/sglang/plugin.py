"""Entry point of the group `sglang.srt.plugins`: hooks kLLM into each process of an SGLang server."""

from __future__ import annotations

import importlib

from kllm_engine.sglang.arguments import detect_device


def register() -> None:
    """Register all hooks; SGLang applies them right after."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from kllm_engine.sglang import redaction  # noqa: PLC0415
    from kllm_engine.sglang.hooks import table  # noqa: PLC0415

    redaction.install()
    for target, function, kind in table():
        HookRegistry.register(target, function, HookType[kind])
    if detect_device() == "cpu":
        from kllm_engine.cpu.paging import install  # noqa: PLC0415

        install(importlib.import_module("sglang.srt.mem_cache.allocator.paged"))
