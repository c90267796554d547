# ruff: noqa: ARG002  the fixed fleet ignores what it is asked
"""The router's data plane on fixed engines, for `relay.py`: everything is real but fleet and tokeniser."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import orjson
import uvloop

from kllm_core.objectives import Binding, Role
from kllm_router.frontend.application import RouterApplication
from kllm_router.frontend.http_server import HttpServer
from kllm_router.interfaces import Endpoint, EngineRequest, WatchedEvent
from kllm_router.metrics import RouterMetrics
from kllm_router.proxy.pairing import Pairing
from kllm_router.proxy.upstream import EngineClient
from kllm_router.scheduling.silence import Awaited
from kllm_router.settings import Settings


class SilentWatch:
    """P's own answer comes at once, so no event is needed."""

    async def next(self) -> WatchedEvent:
        return await asyncio.get_running_loop().create_future()


class FixedFleet:
    ready = True

    def __init__(self, prefill_port: int, decode_port: int) -> None:
        self._prefill = Endpoint("p0", Role.PREFILL, "127.0.0.1", prefill_port, "127.0.0.1", 8998)
        self._decode = Endpoint("d0", Role.DECODE, "127.0.0.1", decode_port)

    def choose_prefill(
        self, request: EngineRequest, *, excluded: frozenset[str] = frozenset(), prefer: str = ""
    ) -> Endpoint:
        return self._prefill

    def choose_decode(
        self, request: EngineRequest, prefill: Endpoint, *, excluded: frozenset[str] = frozenset()
    ) -> Endpoint:
        return self._decode

    def judge(self, endpoint: Endpoint, *, passed: bool) -> None: ...

    def has_lost(self, endpoint: Endpoint, quiet_seconds: float, awaited: Awaited) -> bool:
        return False

    def binding(self, prefill: Endpoint) -> Binding:
        return Binding.LATE

    def bind_after(self, request: EngineRequest) -> float | None:
        return None

    @contextlib.contextmanager
    def watch(self, rid: str, prefill: Endpoint) -> Iterator[SilentWatch]:
        yield SilentWatch()

    def started(self, rid: str, endpoint: Endpoint, tokens: int) -> None: ...

    def finished(self, rid: str, endpoint: Endpoint) -> None: ...

    def status(self) -> dict[str, Any]:
        return {}


class FixedPreparer:
    """Parses the body and adds the same ids to every request."""

    def __init__(self, tokens: int) -> None:
        self._ids = list(range(1000, 1000 + tokens))

    async def prepare(self, path: str, body: bytes) -> EngineRequest:
        given = orjson.loads(body)
        stream = given.pop("stream", False)
        given["input_ids"] = self._ids
        return EngineRequest(
            rid=secrets.token_hex(16), path=path, body=given, input_ids=self._ids, stream=stream, include_usage=False
        )

    def models(self) -> list[dict[str, Any]]:
        return []


async def serve(arguments: argparse.Namespace) -> None:
    settings, metrics = Settings(), RouterMetrics()
    fleet = FixedFleet(arguments.prefill_port, arguments.decode_port)
    client = EngineClient(settings, token="token-of-the-bench")
    pairing = Pairing(fleet, client, settings, metrics)
    application = RouterApplication(
        preparer=FixedPreparer(arguments.tokens), pairing=pairing, fleet=fleet, metrics=metrics
    )
    server = HttpServer(application, settings, on_sweep=client.sweep)
    _, port = await server.start("127.0.0.1", 0)
    print(port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
