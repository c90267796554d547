from __future__ import annotations

import asyncio
import json

import pytest
from router.fake_engine import answer, hang, stream
from router.router_helpers import connected, router, until

from kllm_router.frontend.gate import Gate
from kllm_router.frontend.keys import KeyRing, parse_keys

BODY = b'{"model":"m","messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def keyed(text: str) -> Gate:
    return Gate(keys=KeyRing(parse_keys(text)))


def error_of(response) -> dict:
    error = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: +2\r\n\r\n{}",
        HEAD + b"content-length: 2, 2\r\n\r\n{}",
        HEAD + b"content-length: -2\r\n\r\n{}",
        HEAD + b"content-length : 2\r\n\r\n{}",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"x-folded: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"x-nul: a\0b\r\ncontent-length: 2\r\n\r\n{}",
        HEAD.replace(b"\r\n", b"\n") + b"content-length: 2\n\n{}",
        HEAD + b"host: b\r\ncontent-length: 2\r\n\r\n{}",
        HEAD.replace(b"host: a\r\n", b"") + b"content-length: 2\r\n\r\n{}",
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_an_ambiguous_or_invalid_request_gives_400_and_the_end_of_the_connection(raw):
    async with router() as r, connected(r) as client:
        client.send(raw + b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        response = await client.answer()
        assert response.status == 400
        assert response.headers["connection"] == "close"
        assert error_of(response)["type"] == "invalid_request_error"
        assert await client.closed()
        assert r.prefill.calls == []


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"expect: 200-maybe\r\ncontent-length: 2\r\n\r\n{}", 417),
        (HEAD + b"content-length: 1001\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"258\r\n" + b"x" * 600 + b"\r\n258\r\n" + b"x" * 600, 413),
        (HEAD + b"x: y\r\n" * 101 + b"\r\n", 431),
        (HEAD + b"x: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (HEAD + b"x: " + b"y" * 300_000, 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
    ],
)
async def test_a_request_over_a_limit_is_refused(raw, status):
    async with router(body_bytes=1000) as r, connected(r) as client:
        client.send(raw)
        response = await client.answer()
        assert response.status == status
        error_of(response)
        assert await client.closed()


async def test_a_large_refused_body_still_lets_the_client_read_the_answer():
    async with router(body_bytes=1000) as r, connected(r) as client:
        client.send(HEAD + b"content-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/healthz", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/other", 404),
        ("OPTIONS", "/v1/chat/completions", 204),
        ("GET", "/healthz", 200),
        ("GET", "/livez", 200),
        ("GET", "/readyz?verbose", 200),
        ("GET", "/readyz/router", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/m", 200),
        ("GET", "/kllm/v1/status", 200),
    ],
)
async def test_every_route_answers_and_the_connection_lives_on(method, path, status):
    async with router() as r, connected(r) as client:
        for _ in range(2):
            client.request(method, path)
            response = await client.answer()
            assert response.status == status
            assert response.headers["x-request-id"] if status != 200 else True
            if status == 405:
                assert method not in response.headers["allow"]
            if status in {404, 405}:
                error_of(response)


async def test_head_has_the_length_but_no_body():
    async with router() as r, connected(r) as client:
        client.request("HEAD", "/v1/models")
        response = await client.answer(without_body=True)
        assert int(response.headers["content-length"]) > 0
        client.request("GET", "/healthz")
        assert (await client.answer()).json == {"status": "ok"}


async def test_readiness_follows_the_fleet():
    async with router() as r, connected(r) as client:
        r.fleet.ready = False
        client.request("GET", "/readyz")
        assert (await client.answer()).status == 503
        client.request("GET", "/healthz")
        assert (await client.answer()).status == 200


async def test_a_router_that_knows_its_fleet_takes_requests_whether_or_not_it_can_serve_them():
    async with router() as r, connected(r) as client:
        r.fleet.ready = False
        client.request("GET", "/readyz/router")
        assert (await client.answer()).status == 200
        r.fleet.known = False
        client.request("GET", "/readyz/router")
        assert (await client.answer()).status == 503
        r.fleet.known = r.server.application.stopping = True
        client.request("GET", "/readyz/router")
        assert error_of(await client.answer())["code"] == "router_stopping"


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {"content-type": ""}, {"content-encoding": "gzip"}]
)
async def test_only_plain_json_is_taken(headers):
    async with router() as r, connected(r) as client:
        client.post(headers=headers)
        assert (await client.answer()).status == 415


async def test_a_charset_in_the_content_type_is_fine():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True, headers={"content-type": "application/json; charset=utf-8"})
        assert (await client.answer()).status == 200


async def test_invalid_json_is_the_clients_error_and_reaches_no_engine():
    async with router() as r, connected(r) as client:
        client.request("POST", "/v1/chat/completions", b"{")
        assert (await client.answer()).status == 400
        assert r.prefill.calls == []


async def test_an_api_key_is_needed_where_there_is_one():
    async with router(gate=keyed("secret-key")) as r, connected(r) as client:
        for given in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic secret-key"}):
            client.post(headers=given)
            response = await client.answer()
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
        client.request("GET", "/kllm/v1/status")
        assert (await client.answer()).status == 401
        client.request("GET", "/healthz")
        assert (await client.answer()).status == 200
        client.request("GET", "/v1/models", headers={"authorization": "bearer secret-key"})
        assert (await client.answer()).status == 200


async def test_a_large_body_without_a_valid_key_is_not_read():
    async with router(gate=keyed("secret-key")) as r, connected(r) as client:
        client.send(HEAD + b"content-length: 1000000\r\n\r\n")
        assert (await client.answer()).status == 401
        assert await client.closed()


async def test_expect_100_continue_is_answered_before_the_body():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        body = json.dumps({"stream": True}).encode()
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert (await client.head())[0] == 100
        client.send(body)
        assert (await client.answer()).status == 200


async def test_pipelined_requests_are_answered_one_after_the_other():
    running = 0

    async def script(call, reply):
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1
        await stream(call.body["tag"])(call, reply)

    async with router(pipelined=4) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        for number in range(12):
            client.post(stream=True, tag=f"t{number}")
            client.request("GET", "/nowhere")
        for number in range(12):
            response = await client.answer()
            assert f"t{number}".encode() in response.body
            assert (await client.answer()).status == 404


async def test_a_body_in_chunks_with_trailers_is_taken():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.send(
            HEAD + b'transfer-encoding: chunked\r\n\r\n8\r\n{"stream\r\n7;x=y\r\n":true}\r\n0\r\nx-trailer: z\r\n\r\n'
        )
        assert (await client.answer()).status == 200


async def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
        client.send(head + b'content-length: 15\r\n\r\n{"stream":true}')
        response = await client.answer()
        assert "transfer-encoding" not in response.headers
        assert response.body.endswith(b"data: [DONE]\n\n")


async def test_connection_close_is_honoured():
    async with router() as r, connected(r) as client:
        client.request("GET", "/healthz", headers={"connection": "close"})
        response = await client.answer()
        assert response.headers["connection"] == "close"
        assert await client.closed()


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        (b"POST /v1/chat/comp", "head_seconds"),
        (HEAD + b"content-length: 100\r\n\r\n{", "body_seconds"),
    ],
)
async def test_a_client_that_sends_too_slowly_is_told_so(sent, limit):
    async with router(**{limit: 0.05}) as r, connected(r) as client:
        client.send(sent)
        assert (await client.answer()).status == 408
        assert await client.closed()


async def test_a_client_that_sends_nothing_is_disconnected():
    async with router(head_seconds=0.05) as r, connected(r) as client:
        assert await client.closed()


async def test_an_idle_connection_is_closed():
    async with router(keep_alive_seconds=0.05) as r, connected(r) as client:
        client.request("GET", "/healthz")
        await client.answer()
        assert await client.closed()


async def test_connections_above_the_limit_are_refused():
    async with router(connections=1) as r, connected(r) as first, connected(r) as second:
        assert (await second.answer()).status == 503
        first.request("GET", "/healthz")
        assert (await first.answer()).status == 200


async def test_a_slow_client_slows_the_engine_and_loses_nothing():
    sent = 0
    total = 400

    async def script(call, reply):
        nonlocal sent
        reply.begin()
        for number in range(total):
            await reply.writable.wait()
            reply.chunk(b"data: %06d" % number + b"x" * 65_536 + b"\n\n")
            sent = number + 1
            await asyncio.sleep(0)
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        await client.head()
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert sent < total * 0.9
        parts = []
        while part := await client.chunk():
            parts.append(part)
        events = b"".join(parts).split(b"\n\n")
        assert [int(event[6:12]) for event in events[:total]] == list(range(total))


async def test_a_client_that_takes_nothing_for_too_long_is_disconnected():
    async def script(call, reply):
        reply.begin()
        while True:
            await reply.writable.wait()
            reply.chunk(b"data: " + b"x" * 65_536 + b"\n\n")
            await asyncio.sleep(0)

    async with router(write_stall_seconds=0.1) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        await client.head()
        await until(lambda: r.decode.aborts)
        await until(lambda: not r.server.connections)


async def test_a_slow_client_gets_all_of_an_answer_that_ends_the_connection():
    whole = "x" * 12_000_000
    async with router(linger_seconds=0.02) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = answer(200, whole)
        client.post(headers={"connection": "close"})
        await client.head()
        await asyncio.sleep(0.3)
        body = await client.reader.readexactly(len(whole) + 2)
        assert body.strip(b'"').decode() == whole
        assert await client.closed()


async def test_shutdown_lets_streams_finish_and_takes_nothing_new():
    async with router() as r, connected(r) as client, connected(r) as idle:
        gate = asyncio.Event()

        async def script(call, reply):
            reply.begin()
            reply.chunk(b"data: a\n\n")
            await gate.wait()
            reply.chunk(b"data: [DONE]\n\n")
            reply.end()

        r.prefill_when_asked()
        r.decode.script = script
        idle.request("GET", "/healthz")
        await idle.answer()
        client.post(stream=True)
        await client.head()
        closing = asyncio.ensure_future(r.server.close(drain_seconds=5))
        assert await idle.closed()
        with pytest.raises(OSError, match=r"refused|failed"):
            await asyncio.open_connection("127.0.0.1", r.port)
        gate.set()
        parts = []
        while part := await client.chunk():
            parts.append(part)
        assert b"".join(parts) == b"data: a\n\ndata: [DONE]\n\n"
        assert await client.closed()
        client.leave()
        assert await closing
        assert r.decode.aborts == []


async def test_shutdown_cuts_and_aborts_what_does_not_finish():
    async with router() as r, connected(r) as client:
        r.decode.script = hang
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        assert not await r.server.close(drain_seconds=0.05)
        await r.pairing.close()
        assert len(r.prefill.aborts) == 1
        told = await client.answer()
        assert told.status == 503
        assert json.loads(told.body)["error"]["code"] == "router_stopping"
        assert await client.closed()


async def test_a_stream_that_shutdown_cuts_ends_with_an_error_event_and_looks_cut():
    async with router() as r, connected(r) as client:

        async def script(call, reply):
            reply.begin()
            reply.chunk(b"data: a\n\n")
            await asyncio.Event().wait()

        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        await client.head()
        assert await client.chunk() == b"data: a\n\n"
        assert not await r.server.close(drain_seconds=0.05)
        event = await client.chunk()
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "router_stopping"
        assert await client.closed()
        await r.pairing.close()
        assert len(r.decode.aborts) == 1


async def test_a_client_that_closes_at_the_end_of_its_stream_is_neither_missed_nor_aborted():
    async with router() as r:

        async def script(call, reply):
            reply.begin()
            reply.chunk(b"data: a\n\ndata: [DONE]\n\n")
            await asyncio.Event().wait()

        r.prefill_when_asked()
        r.decode.script = script
        async with connected(r) as client:
            client.post(stream=True)
            await client.head()
            assert b"[DONE]" in await client.chunk()
            client.leave()
            await until(lambda: b'code="200",endpoint="/v1/chat/completions"' in r.metrics.text())
        await r.pairing.close()
        assert r.decode.aborts == []
        assert b'code="499"' not in r.metrics.text()


async def test_metrics_count_answers_and_times():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a", "b")
        client.post(stream=True)
        await client.answer()
        await until(lambda: r.summaries)
        client.request("GET", "/metrics")
        text = (await client.answer()).body.decode()
    assert 'kllm_router_requests_total{code="200",endpoint="/v1/chat/completions"} 1.0' in text
    for name in ("ttft", "tpot", "queue", "prefill", "bind", "transfer"):
        assert f"kllm_router_request_{name}_seconds_count 1.0" in text
    assert 'kllm_router_tokens_total{kind="completion"} 2.0' in text
