"""The zygote that forks an agent's engine: one that several agents share, or a child of the agent's own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kllm_engine.agent.exceptions import StartError

PROGRAM = (sys.executable, "-P", "-m", "kllm_engine.main", "zygote")
"""Command of a zygote of the agent's own, without its flags."""

_TERM_SECONDS = 5.0


class Zygote:
    """One zygote. One of the agent's own ends with the agent, and is started again when it has ended before.

    Args:
        shared: socket of a zygote that runs already; None for one of the agent's own.
        own: where the agent's own listens.
        model: whose tokenizer the agent's own loads, besides its imports.

    Attributes:
        socket: where it listens.
    """

    def __init__(self, *, shared: Path | None, own: Path, model: str) -> None:
        self.socket = shared or own
        self._is_own = shared is None
        self._model = model
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the agent's own, unless it runs, and wait until its imports are done. A shared one is left alone.

        Raises:
            StartError: it ended instead.
        """
        if not self._is_own or self._runs():
            return
        self._process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            "--socket",
            str(self.socket),
            "--model",
            self._model,
            "--parent-pid",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await _until_ready(self._process)
        except BaseException:
            await self.stop()
            raise

    async def ended(self) -> int:
        """Wait for the end of the agent's own, and return its exit status."""
        if self._process is None:
            raise RuntimeError("the agent has no zygote of its own")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the agent's own, and with it every server that it forked."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_TERM_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _runs(self) -> bool:
        return self._process is not None and self._process.returncode is None


async def _until_ready(process: asyncio.subprocess.Process) -> None:
    if process.stdout is None or not await process.stdout.readline():
        raise StartError(f"the zygote ended with status {await process.wait()}; its log is on stderr")
