"""Calls that do not wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def together(*calls: Awaitable[object]) -> None:
    """Wait for the end of all, whatever becomes of each.

    Raises:
        Exception: that of the first one, in the order in which they are given, that has failed.
    """
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
