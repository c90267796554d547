"""The operator's own HTTP server: is it alive, is it ready, what does it count."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from kllm_operator.metrics import OperatorMetrics

PORT = 8080


class HttpServer:
    """Answers /livez, /readyz and /metrics.

    Args:
        metrics: what it counts.
        alive: why it is not alive; empty when it is. Asked by the kubelet, which ends what is not.
        ready: why it is not ready; empty when it is.
    """

    def __init__(self, metrics: OperatorMetrics, *, alive: Callable[[], str], ready: Callable[[], str]) -> None:
        self._metrics = metrics
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        app = web.Application()
        app.add_routes([
            web.get("/livez", self._livez), web.get("/readyz", self._readyz), web.get("/metrics", self._counts)
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def close(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:
        del request
        return _verdict(self._alive())

    async def _readyz(self, request: web.Request) -> web.Response:
        del request
        return _verdict(self._ready())

    async def _counts(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _verdict(trouble: str) -> web.Response:
    return web.Response(text=trouble or "ok", status=503 if trouble else 200)
