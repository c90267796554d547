"""The router's event loop, which follows each instance by several streams beside those of clients."""

from __future__ import annotations

import uvloop

from kllm_core.wakeups import PromptWakeups


class PromptLoop(PromptWakeups, uvloop.Loop):  # type: ignore[misc]  # uvloop says of its own methods other types
    """That of uvloop, but for how gRPC wakes it."""
