"""What stands between the router and one instance: both its HTTP port and its agent, to be cut or silenced."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kllm_core.authentication import METADATA_KEY
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc

_READ_BYTES = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class HttpProxy:
    """Passes bytes between the router and an engine's HTTP port.

    Attributes:
        passing: cleared, every byte in either direction waits, as when the other host has vanished; the engine sees no
            end either.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.passing = asyncio.Event()
        self.passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())

    def reset(self) -> None:
        """Cut every connection with a TCP reset, on both sides; new ones are taken as before."""
        for writer in list(self._writers):
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def stop(self) -> None:
        """Listen no more and cut what is left."""
        if self._server is not None:
            self._server.close()
        self.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.passing.wait()
        try:
            engine_reader, engine_writer = await asyncio.open_connection(*self._target)
        except OSError:
            # Nobody listens there, which a client without the proxy would be told by a reset.
            writer.transport.abort()
            return
        both = (writer, engine_writer)
        self._writers.update(both)
        try:
            await asyncio.gather(self._pass_on(reader, engine_writer), self._pass_on(engine_reader, writer))
        finally:
            self._writers.difference_update(both)
            for end in both:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                await self.passing.wait()
                writer.write(data)
                await writer.drain()
            await self.passing.wait()
            writer.write_eof()
        except OSError:
            writer.transport.abort()


class AgentProxy(engine_pb2_grpc.EngineAgentServicer):
    """Passes an agent's streams on to the router and gives it the HTTP proxy's address as the engine's.

    Attributes:
        passing: cleared, nothing is told and nothing is answered.
        telling: cleared, a finished prefill is kept from the router, so that its KV stays parked.
        parked: set when such an event was kept.
    """

    def __init__(self, agent: str, *, http: HttpProxy | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(agent)
        self._stub: Any = engine_pb2_grpc.EngineAgentStub(self._channel)
        self._http = http
        self.passing, self.telling, self.parked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.passing.set()
        self.telling.set()
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.address = ""

    async def start(self) -> None:
        """Listen on a free port."""
        engine_pb2_grpc.add_EngineAgentServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """End all streams."""
        await self._server.stop(0)
        await self._channel.close()

    # --- the contract

    async def GetInstance(self, request, context):  # noqa: N802
        facts = await self._ask(self._stub.GetInstance, request, context)
        if self._http is not None:
            facts.http_address = self._http.address
        return facts

    async def WatchLoad(self, request, context):  # noqa: N802
        async for report in self._follow(self._stub.WatchLoad, request, context):
            yield report

    async def WatchRequests(self, request, context):  # noqa: N802
        async for event in self._follow(self._stub.WatchRequests, request, context):
            if event.kind == engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE and not self.telling.is_set():
                self.parked.set()
                await self.telling.wait()
                await self.passing.wait()
            yield event

    async def WatchCache(self, request, context):  # noqa: N802
        async for update in self._follow(self._stub.WatchCache, request, context):
            yield update

    async def _ask(self, method: Any, request: Any, context: Any) -> Any:
        await self.passing.wait()
        try:
            answer = await method(request, metadata=_token(context))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        await self.passing.wait()
        return answer

    async def _follow(self, method: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.passing.wait()
        call = method(request, metadata=_token(context))
        try:
            await call.initial_metadata()
            await context.send_initial_metadata(())
            async for message in call:
                await self.passing.wait()
                yield message
        except grpc.aio.AioRpcError as error:
            with contextlib.suppress(grpc.aio.AbortError):
                await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()


def _token(context: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in context.invocation_metadata() or () if key == METADATA_KEY]
