"""SGLang's POST /pd_role_switch (0.5.21)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kllm_core.authentication import bearer
from kllm_core.objectives import Role

_SECONDS = 120.0
"""A first switch to decode may capture CUDA graphs."""

Switch = Callable[[Role], Awaitable[None]]
"""Makes the engine take a role.

Raises:
    SwitchRefusedError: it has refused and is as before.
    SwitchBrokenError: it is unusable.
"""


class SwitchRefusedError(Exception):
    """The engine has refused and is as before."""


class SwitchBrokenError(Exception):
    """The engine is unusable."""


async def switch_role(role: Role, *, host: str, port: int, token: str) -> None:
    """Ask a server to take a role; see `Switch`."""
    # Imported on first use: most agents never switch.
    import aiohttp  # noqa: PLC0415

    body: dict[str, Any] = {"new_role": role.value}
    if role is Role.DECODE:
        # Room that the graphs need; without a measured size a capture that fails leaves the engine without them.
        body["decode_cuda_graph_memory_gb"] = 0.0
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers={"Authorization": bearer(token)}) as session,
            session.post(f"http://{host}:{port}/pd_role_switch", json=body) as answer,
        ):
            told = await answer.json(content_type=None)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise SwitchBrokenError(f"the engine gave no answer: {error or type(error).__name__}") from error
    if not isinstance(told, dict):
        raise SwitchBrokenError(f"the engine answered {answer.status} without an explanation")
    if told.get("success"):
        return
    message = str(told.get("message") or told)
    if told.get("safe_to_restore"):
        raise SwitchRefusedError(message)
    raise SwitchBrokenError(message)
