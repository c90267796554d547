"""A zygote of the agent's own, for a pod with one engine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kllm_engine.agent.exceptions import StartError

_TERM_SECONDS = 5.0


class OwnZygote:
    """A child process that forks the engine; ends with the agent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, socket_path: Path) -> OwnZygote:
        """Start it and wait until its imports are done.

        Raises:
            StartError: it ended instead.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "kllm_engine.main",
            "zygote",
            "--socket",
            str(socket_path),
            "--parent-pid",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        zygote = cls(process)
        try:
            await zygote._until_ready()
        except BaseException:
            await zygote.stop()
            raise
        return zygote

    async def _until_ready(self) -> None:
        if self._process.stdout is None or not await self._process.stdout.readline():
            raise StartError(f"the zygote ended with status {await self._process.wait()}; its log is on stderr")

    async def stop(self) -> None:
        """End it, and with it every server that it forked."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_TERM_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
