"""A router on fake engines: harness, fake fleet, and raw HTTP clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from router.fake_engine import FakeEngine

from kllm_core.objectives import Binding, Role
from kllm_router.frontend.application import RouterApplication
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.http_server import HttpServer
from kllm_router.interfaces import ApiError, Endpoint, EngineRequest, EventKind, RequestSummary, WatchedEvent
from kllm_router.metrics import RouterMetrics
from kllm_router.proxy.pairing import Pairing
from kllm_router.proxy.upstream import EngineClient
from kllm_router.scheduling.silence import Awaited
from kllm_router.settings import HttpLimits, PoolLimits, RecoverySettings, Settings, Timeouts, WaitSettings

TOKEN = "fleet-token-of-the-test"


async def until(condition: Callable[[], Any], *, seconds: float = 5.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.002)


class FakeWatch:
    def __init__(self) -> None:
        self.events: asyncio.Queue[WatchedEvent] = asyncio.Queue()

    async def next(self) -> WatchedEvent:
        return await self.events.get()


class FakeFleet:
    """A fleet that takes the first instance that is not excluded, with its accounting in the open."""

    def __init__(self, prefills: list[Endpoint], decodes: list[Endpoint]) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.judged: list[tuple[str, bool]] = []
        self.forgetful: set[str] = set()
        self.wish = Binding.LATE
        self.bind_seconds: float | None = None
        self.ready = True
        self.known = True
        self.prefill_error: ApiError | None = None
        self.decode_error: ApiError | None = None
        self.changes = asyncio.Event()
        self.waiting = 0
        self.watches: dict[tuple[str, str], FakeWatch] = {}
        self.inflight: dict[tuple[str, str], int] = {}

    def choose_prefill(
        self, request: EngineRequest, *, excluded: frozenset[str] = frozenset(), prefer: str = ""
    ) -> Endpoint:
        if self.prefill_error is not None:
            raise self.prefill_error
        preferred = [endpoint for endpoint in self.prefills if endpoint.instance_id == prefer]
        return self._first([*preferred, *self.prefills], excluded)

    def choose_decode(
        self, request: EngineRequest, prefill: Endpoint, *, excluded: frozenset[str] = frozenset()
    ) -> Endpoint:
        if self.decode_error is not None:
            raise self.decode_error
        return self._first(self.decodes, excluded)

    def _first(self, endpoints: list[Endpoint], excluded: frozenset[str]) -> Endpoint:
        for endpoint in endpoints:
            if endpoint.instance_id not in excluded:
                return endpoint
        raise ApiError(503, "no instance can serve", type="server_error", code="no_instance", retry_after=1.0)

    async def changed(self) -> None:
        self.waiting += 1
        try:
            await self.changes.wait()
        finally:
            self.waiting -= 1
        self.changes.clear()

    def judge(self, endpoint: Endpoint, *, passed: bool) -> None:
        self.judged.append((endpoint.instance_id, passed))

    def has_lost(self, endpoint: Endpoint, quiet_seconds: float, awaited: Awaited) -> bool:
        return endpoint.instance_id in self.forgetful

    def binding(self, prefill: Endpoint) -> Binding:
        return self.wish

    def bind_after(self, request: EngineRequest) -> float | None:
        return self.bind_seconds

    @contextmanager
    def watch(self, rid: str, endpoint: Endpoint) -> Iterator[FakeWatch]:
        key = (rid, endpoint.instance_id)
        self.watches[key] = FakeWatch()
        try:
            yield self.watches[key]
        finally:
            del self.watches[key]

    def started(self, rid: str, endpoint: Endpoint, tokens: int) -> None:
        self.inflight[rid, endpoint.instance_id] = tokens

    def finished(self, rid: str, endpoint: Endpoint) -> None:
        self.inflight.pop((rid, endpoint.instance_id), None)

    def status(self) -> dict[str, Any]:
        return {"instances": [{"id": endpoint.instance_id} for endpoint in (*self.prefills, *self.decodes)]}

    def tell(self, kind: EventKind, *, rid: str | None = None, of: str | None = None, **facts: Any) -> None:
        """Send an event of an instance, or of all prefill instances, to those who watch one request, or any."""
        names = {endpoint.instance_id for endpoint in self.prefills} if of is None else {of}
        for (watched, instance), watch in list(self.watches.items()):
            if instance in names and rid in (None, watched):
                watch.events.put_nowait(WatchedEvent(kind, instance_id=instance, **facts))


class FakePreparer:
    """Takes any JSON object."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None

    async def prepare(self, path: str, body: bytes) -> EngineRequest:
        try:
            given = json.loads(body)
        except ValueError:
            raise ApiError(400, "the body is not JSON") from None
        if self.gate is not None:
            await self.gate.wait()
        stream = given.pop("stream", False)
        options = given.pop("stream_options", None) or {}
        given["input_ids"] = [1, 2, 3]
        return EngineRequest(
            rid=secrets.token_hex(16),
            path=path,
            body=given,
            input_ids=(1, 2, 3),
            stream=stream,
            include_usage=bool(options.get("include_usage")),
            model=given.get("model", ""),
        )

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "object": "model", "created": 1, "owned_by": "kllm"}]


@dataclass
class Router:
    """Everything of one router under test."""

    prefills: list[FakeEngine]
    decodes: list[FakeEngine]
    fleet: FakeFleet
    preparer: FakePreparer
    pairing: Pairing
    client: EngineClient
    server: HttpServer
    metrics: RouterMetrics
    port: int
    summaries: list[RequestSummary]

    @property
    def prefill(self) -> FakeEngine:
        return self.prefills[0]

    @property
    def decode(self) -> FakeEngine:
        return self.decodes[0]

    def prefill_done(self, **facts: Any) -> None:
        self.fleet.tell(EventKind.PREFILL_DONE, **facts)

    def prefill_when_asked(self) -> None:
        """Let P finish every prompt at once, and its own answer when D was asked."""

        async def script(call: Any, reply: Any) -> None:
            self.fleet.tell(
                EventKind.PREFILL_DONE,
                rid=call.body["rid"],
                queue_seconds=0.001,
                prefill_seconds=0.0001,
                prompt_tokens=3,
                cached_tokens=2,
            )
            await until(lambda: call.body["rid"] in [c.body["rid"] for e in self.decodes for c in e.calls])
            reply.json(200, {"id": call.body["rid"]})

        for engine in self.prefills:
            engine.script = script


def settings(wait: WaitSettings | None = None, **changes: Any) -> Settings:
    """Settings with some fields of any of their parts changed, and quick sweeps."""
    parts: dict[str, Any] = {
        "http": HttpLimits(),
        "timeouts": Timeouts(),
        "pool": PoolLimits(),
        "recovery": RecoverySettings(patience_seconds=0.0),
    }
    for name, value in changes.items():
        part = next(key for key, part in parts.items() if name in {f.name for f in dataclasses.fields(part)})
        parts[part] = dataclasses.replace(parts[part], **{name: value})
    return Settings(**parts, wait=wait or WaitSettings(), sweep_seconds=0.02)


@asynccontextmanager
async def router(
    *, gate: Gate | None = None, prefills: int = 1, decodes: int = 1, **changes: Any
) -> AsyncIterator[Router]:
    """Run a router over fake engines."""
    chosen = settings(**changes)
    async with AsyncExitStack() as stack:
        ps = [await stack.enter_async_context(FakeEngine(f"p{i}", Role.PREFILL)) for i in range(prefills)]
        ds = [await stack.enter_async_context(FakeEngine(f"d{i}", Role.DECODE)) for i in range(decodes)]
        fleet = FakeFleet([engine.endpoint for engine in ps], [engine.endpoint for engine in ds])
        metrics = RouterMetrics()
        client = EngineClient(chosen, token=TOKEN)
        pairing = Pairing(fleet, client, chosen, metrics)
        summaries: list[RequestSummary] = []
        pairing.listeners.append(summaries.append)
        preparer = FakePreparer()
        application = RouterApplication(preparer=preparer, pairing=pairing, fleet=fleet, metrics=metrics, gate=gate)
        server = HttpServer(application, chosen, on_sweep=client.sweep)
        _, port = await server.start(("127.0.0.1", 0))
        try:
            yield Router(ps, ds, fleet, preparer, pairing, client, server, metrics, port, summaries)
        finally:
            await server.close(drain_seconds=0)
            await pairing.close()
            await client.close()


@dataclass
class Answer:
    """A response as a client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        return [event for event in self.body.split(b"\n\n") if event]


class Client:
    """A raw connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> None:
        lines = {"host": "router", **(headers or {})}
        if body is not None:
            lines = {"content-type": "application/json", "content-length": str(len(body)), **lines}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (body or b""))

    def post(self, *, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **fields: Any) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        self.request("POST", path, json.dumps(body).encode(), headers)

    async def head(self) -> tuple[int, dict[str, str]]:
        text = (await self._within(self.reader.readuntil(b"\r\n\r\n"))).decode("latin-1")
        lines = text.split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        size = int(await self._within(self.reader.readuntil(b"\r\n")), 16)
        return (await self._within(self.reader.readexactly(size + 2)))[:-2]

    async def answer(self, *, without_body: bool = False) -> Answer:
        status, headers = await self.head()
        if without_body or status in {204, 304}:
            return Answer(status, headers, b"")
        if "content-length" in headers:
            return Answer(status, headers, await self._within(self.reader.readexactly(int(headers["content-length"]))))
        if headers.get("transfer-encoding") != "chunked":
            return Answer(status, headers, await self._within(self.reader.read()))
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return Answer(status, headers, b"".join(parts))

    async def closed(self) -> bool:
        """Whether the router closes the connection, with nothing more on it."""
        try:
            return await self._within(self.reader.read(1)) == b""
        except ConnectionError:
            return True

    def leave(self) -> None:
        self.writer.transport.abort()

    async def _within(self, work: Any) -> Any:
        return await asyncio.wait_for(work, 5)


async def got(port: int, path: str) -> Any:
    """The answer to a GET on a connection of its own."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.request("GET", path)
    answer = await asyncio.wait_for(client.answer(), 5)
    client.leave()
    return answer


@asynccontextmanager
async def connected(target: Router) -> AsyncIterator[Client]:
    """A client's connection to the router."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
