"""Asks the engine's HTTP server whether it is ready. Never by a health check, which would generate a token."""

from __future__ import annotations

import asyncio

from kllm_core.authentication import bearer

_STATUS_LINE_LIMIT = 1024


async def is_ready(host: str, port: int, *, token: str, timeout_seconds: float) -> bool:
    """Whether GET /ready answers 200 in time."""
    request = (
        f"GET /ready HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: {bearer(token)}\r\nConnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port, limit=_STATUS_LINE_LIMIT)
            try:
                writer.write(request.encode())
                await writer.drain()
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
    return len(status) >= 2 and status[1] == b"200"
