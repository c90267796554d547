from __future__ import annotations

import asyncio
import json

import pytest
from router.fake_engine import answer, delta, hang, stream
from router.router_helpers import connected, router, until

from kllm_core.objectives import Binding
from kllm_router.interfaces import ApiError, EventKind

pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(response) -> dict:
    """The error, after a check of its form."""
    assert set(response.json) == {"error"}
    error = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def streaming_forever(call, reply) -> None:
    reply.begin()
    number = 0
    while True:
        reply.event(delta(str(number)))
        number += 1
        await asyncio.sleep(0.005)


async def freed(r, *, prefill: bool = True, decode: bool = True) -> None:
    """Wait until a failed request has left both engines and the accounting."""
    await until(lambda: r.summaries)
    rid = r.summaries[0].rid
    await until(lambda: r.prefill.aborts == [rid] * prefill and r.decode.aborts == [rid] * decode)
    await until(lambda: all(call.closed.is_set() for call in (*r.prefill.calls, *r.decode.calls)))
    assert r.fleet.inflight == {}
    assert r.fleet.watches == {}


@pytest.mark.parametrize("stage", ["prefill", "handshake", "streaming"])
async def test_a_client_that_leaves_frees_both_engines_at_once(stage):
    async with router() as r, connected(r) as client:
        r.decode.script = hang if stage == "handshake" else streaming_forever
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        if stage != "prefill":
            r.prefill_done()
            await until(lambda: r.decode.calls)
        if stage == "streaming":
            await client.head()
            await client.chunk()
        client.leave()
        await freed(r, decode=stage != "prefill")
        assert r.summaries[0].status == 499
        assert r.summaries[0].stage == stage


async def test_a_client_that_leaves_while_its_request_is_prepared_reaches_no_engine():
    async with router() as r, connected(r) as client:
        r.preparer.gate = asyncio.Event()
        client.post(stream=True)
        await until(lambda: r.metrics.registry.get_sample_value("kllm_router_inflight_requests") == 1)
        client.leave()
        await until(lambda: r.metrics.registry.get_sample_value("kllm_router_inflight_requests") == 0)
        assert r.prefill.calls == []


async def test_a_client_that_closes_its_sending_side_counts_as_gone():
    async with router() as r, connected(r) as client:
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        client.writer.write_eof()
        await freed(r, decode=False)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, {"object": "error", "message": "too long", "type": "BadRequestError", "param": "x", "code": 400}, 400),
        (400, {"error": {"message": "too long"}}, 400),
        (422, {"detail": "too long"}, 422),
        (429, {"error": {"message": "too long"}}, 429),
        (500, {"object": "error", "message": "too long", "type": "InternalServerError", "code": 500}, 502),
        (503, {"object": "error", "message": "too long", "code": 503}, 503),
        (401, {"error": "too long"}, 502),
        (404, {"message": "too long"}, 404),
    ],
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engines_error_is_told_in_openais_form(side, status, body, expected):
    async with router() as r, connected(r) as client:
        if side == "prefill":
            r.prefill.script = answer(status, body)
        else:
            r.decode.script = answer(status, body)
        client.post(stream=True)
        if side == "decode":
            await until(lambda: r.prefill.calls)
            r.prefill_done()
        response = await client.answer()
        assert response.status == expected
        assert "too long" in error_of(response)["message"]
        await until(lambda: r.summaries)
        assert r.decode.aborts == []
        await until(lambda: len(r.prefill.aborts) == (side == "decode"))


async def test_an_error_that_is_the_first_event_of_a_stream_becomes_a_status():
    async def script(call, reply):
        reply.begin()
        reply.event({"error": {"object": "error", "message": "KVTransferError", "type": "x", "code": 500}})
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        response = await client.answer()
        assert response.status == 502
        assert "KVTransferError" in error_of(response)["message"]


@pytest.mark.parametrize("how", ["event", "connection", "silent_agent"])
async def test_a_prefill_instance_that_is_lost_before_it_is_done_gives_503(how):
    async with router() as r, connected(r) as client:
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        if how == "connection":
            r.prefill.drop_connections()
        else:
            r.fleet.tell(EventKind.INSTANCE_LOST, message="killed")
        response = await client.answer()
        assert response.status == 503
        assert error_of(response)["code"] == "prefill_lost"
        assert response.headers["retry-after"] == "1"
        await freed(r, decode=False)
        assert r.decode.calls == []


async def test_an_engine_that_cannot_be_reached_gives_503_and_no_abort():
    async with router() as r, connected(r) as client:
        await r.prefill.stop()
        client.post(stream=True)
        response = await client.answer()
        assert response.status == 503
        assert "p0" in error_of(response)["message"]
        await until(lambda: r.summaries)
        await r.pairing.close()
        assert (
            r.metrics.registry.get_sample_value("kllm_router_aborts_total", {"role": "prefill", "outcome": "failed"})
            is None
        )


async def test_a_failed_event_is_explained_by_the_prefill_instances_own_answer():
    async with router() as r, connected(r) as client:

        async def script(call, reply):
            r.fleet.tell(EventKind.FAILED, message="short")
            await asyncio.sleep(0.02)
            reply.json(400, {"object": "error", "message": "the long reason", "code": 400})

        r.prefill.script = script
        client.post(stream=True)
        response = await client.answer()
        assert (response.status, error_of(response)["message"]) == (400, "the long reason")


async def test_a_parked_prompt_that_is_given_up_is_tried_again_and_then_gives_503():
    async with router() as r, connected(r) as client:
        r.decode.script = hang
        client.post(stream=True)
        for number in range(1, 4):
            await until(lambda wanted=number: len(r.prefill.calls) == wanted)
            r.prefill_done()
            await until(lambda wanted=number: len(r.decode.calls) == wanted)
            rids = {call.body["rid"] for call in r.decode.calls}
            assert len(rids) == number
            r.fleet.tell(EventKind.RELEASED, reason="ParkTimeout", message="waited too long")
        response = await client.answer()
        assert response.status == 503
        assert "waited too long" in error_of(response)["message"]
        await until(lambda: set(r.prefill.aborts) == set(r.decode.aborts) == rids)
        assert r.fleet.inflight == {}


async def test_a_prefill_instance_lost_after_the_transfer_does_not_matter():
    async with router(prefill_lost=0.02) as r, connected(r) as client:
        gate = asyncio.Event()

        async def script(call, reply):
            await gate.wait()
            await stream("a")(call, reply)

        r.decode.script = script
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        r.prefill_done()
        await until(lambda: r.decode.calls)
        r.fleet.tell(EventKind.RELEASED, reason="Transferred")
        r.fleet.tell(EventKind.INSTANCE_LOST)
        await asyncio.sleep(0.1)
        gate.set()
        assert (await client.answer()).status == 200


async def test_a_prefill_instance_lost_during_the_handshake_gives_503_soon():
    async with router(prefill_lost=0.02) as r, connected(r) as client:
        r.decode.script = hang
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        r.prefill_done()
        await until(lambda: r.decode.calls)
        r.fleet.tell(EventKind.INSTANCE_LOST)
        assert (await client.answer()).status == 503
        await freed(r)


async def test_a_decode_instance_lost_before_its_first_byte_gives_503():
    async def script(call, reply):
        reply.cut()
        await call.closed.wait()

    async with router() as r, connected(r) as client:
        r.decode.script = script
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        r.prefill_done()
        response = await client.answer()
        assert response.status == 503
        assert "d0" in error_of(response)["message"]
        await freed(r)


async def test_a_stream_that_breaks_ends_with_an_error_event():
    async def script(call, reply):
        reply.begin()
        reply.event(delta("a"))
        await asyncio.sleep(0.02)
        reply.cut()
        await call.closed.wait()

    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        response = await client.answer()
        assert response.status == 200
        assert len(response.events) == 2
        error = json.loads(response.events[1].removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert await client.closed()
        await until(lambda: r.decode.aborts)
        assert r.summaries[0].status == 503
        assert r.summaries[0].stage == "streaming"


async def test_a_stream_that_stalls_is_ended():
    async def script(call, reply):
        reply.begin()
        reply.event(delta("a"))
        await call.closed.wait()

    async with router(stall=0.05) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post(stream=True)
        response = await client.answer()
        assert b"sent nothing for" in response.events[-1]
        await until(lambda: r.decode.aborts)


@pytest.mark.parametrize(("limit", "stage"), [("prefill", "prefill"), ("first_token", "handshake")])
async def test_what_takes_too_long_gives_504_and_is_freed(limit, stage):
    async with router(**{limit: 0.05}) as r, connected(r) as client:
        r.decode.script = hang
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        if stage == "handshake":
            r.prefill_done()
        response = await client.answer()
        assert response.status == 504
        assert error_of(response)["code"] == "timeout"
        await freed(r, decode=stage == "handshake")


async def test_a_request_that_takes_longer_than_allowed_in_all_is_ended():
    async with router(total=0.1) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = streaming_forever
        client.post(stream=True)
        response = await client.answer()
        assert b'"code":"timeout"' in response.events[-1]
        await until(lambda: r.decode.aborts)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_fleet_that_has_no_instance_refuses(side):
    async with router() as r, connected(r) as client:
        refusal = ApiError(429, "all are busy", type="rate_limit_error", retry_after=7)
        setattr(r.fleet, f"{side}_error", refusal)
        client.post(stream=True)
        if side == "decode":
            await until(lambda: r.prefill.calls)
            r.prefill_done()
        response = await client.answer()
        assert (response.status, response.headers["retry-after"]) == (429, "7")
        if side == "decode":
            await freed(r, decode=False)


async def test_early_binding_frees_both_when_prefill_refuses():
    async with router() as r, connected(r) as client:
        r.fleet.wish = Binding.EARLY
        r.prefill.script = answer(400, {"message": "no"})
        r.decode.script = hang
        client.post(stream=True)
        assert (await client.answer()).status == 400
        await freed(r, prefill=False)


async def test_an_abort_that_fails_is_counted():
    async with router() as r, connected(r) as client:
        r.prefill.abort_status = 500
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        client.leave()
        await until(lambda: r.prefill.aborts)
        await r.pairing.close()
        labels = {"role": "prefill", "outcome": "refused"}
        assert r.metrics.registry.get_sample_value("kllm_router_aborts_total", labels) == 1


@pytest.mark.parametrize(
    "reply_bytes",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nbody until the end",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_an_engine_that_breaks_the_protocol_gives_an_error(reply_bytes):
    async def script(call, reply):
        reply.raw(reply_bytes)
        await call.closed.wait()

    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = script
        client.post()
        assert (await client.answer()).status == 503


async def test_a_plain_answer_that_is_too_large_gives_an_error():
    async with router(response_bytes=1000) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = answer(200, "x" * 2000)
        client.post()
        response = await client.answer()
        assert response.status == 503
        assert "1000 bytes" in error_of(response)["message"]
