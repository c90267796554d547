"""The operator's event loop, which follows thousands of streams."""

from __future__ import annotations

import asyncio

from kllm_core.wakeups import PromptWakeups


class PromptLoop(PromptWakeups, asyncio.SelectorEventLoop):
    """The usual one, but for how gRPC wakes it."""
