"""Engines that say a fixed text and can go on in the midst of it: token ids are code points."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from router.fake_engine import Call, FakeEngine, Reply
from router.router_helpers import Router, until

from kllm_router.interfaces import ApiError, EngineRequest, EventKind
from kllm_router.proxy.exchange import Exchange

TEXT = 'Grüße, "Welt"\n\n: kllm-ids 1,2\n\ndata: [DONE] 🌍 ünd mehr'
PROMPT = (1, 2, 3)
PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
PIECE = 4
"""Characters of one chunk."""

Fault = Callable[[Call, Reply], Awaitable[None]]


def request(path: str, *, stream: bool = True, **body: Any) -> EngineRequest:
    rid = f"{len(path):032x}"
    return EngineRequest(rid, path, body, PROMPT, stream=stream, include_usage=True, max_new_tokens=1000)


def speaks(created: int, *, text: str = TEXT, dies_after: int | None = None, fault: Fault | None = None) -> Any:
    """A decode instance's script.

    Args:
        created: that its events carry.
        text: what it says.
        dies_after: chunks; then `fault` runs.
        fault: what happens then.
    """

    async def script(call: Call, reply: Reply) -> None:
        told = len(call.body.get("kllm_resume_output_ids", ()))
        if not call.body.get("stream"):
            reply.json(200, {"id": call.body["rid"], "text": text})
            return
        assert call.body["kllm_token_ids"] is True
        assert call.body.get("kllm_resume_output_ids", []) == [ord(c) for c in text[:told]]
        reply.begin()
        for number, start in enumerate(range(told, len(text), PIECE)):
            if number == dies_after and fault is not None:
                await fault(call, reply)
                return
            end = min(start + PIECE, len(text))
            ids = ",".join(str(ord(c)) for c in text[start:end])
            reply.chunk(f": kllm-ids {ids}\n\n".encode() + events(call, created, text, start=start, end=end))
            await asyncio.sleep(0)
        reply.chunk(ending(call, created, text))
        reply.end()

    return script


def events(call: Call, created: int, text: str, *, start: int, end: int) -> bytes:
    """What an engine says for some of the text."""
    head = {"id": call.body["rid"], "object": "x", "created": created, "model": "m"}
    if call.path == "/generate":
        meta = {"id": call.body["rid"], "finish_reason": None, "completion_tokens": end}
        return written({"text": text[:end], "output_ids": [ord(c) for c in text[:end]], "meta_info": meta})
    if call.path == "/v1/completions":
        return written({**head, "choices": [{"index": 0, "text": text[start:end], "finish_reason": None}]})
    role = written({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    said = written({**head, "choices": [{"index": 0, "delta": {"content": text[start:end]}, "finish_reason": None}]})
    return role + said if start == 0 else said


def ending(call: Call, created: int, text: str) -> bytes:
    """The last chunk: the finish reason, usage and the end."""
    head = {"id": call.body["rid"], "object": "x", "created": created, "model": "m"}
    counts = {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + len(text), "completion_tokens": len(text)}
    if call.path == "/generate":
        meta = {"id": call.body["rid"], "finish_reason": {"type": "length"}, "completion_tokens": len(text)}
        last = written({"text": text, "output_ids": [ord(c) for c in text], "meta_info": meta})
    else:
        last = written({**head, "choices": [{"index": 0, "finish_reason": "length"}]})
        last += written({**head, "choices": [], "usage": counts})
    return last + b"data: [DONE]\n\n"


def written(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


async def reset(call: Call, reply: Reply) -> None:
    """The connection breaks."""
    reply.cut()
    await call.closed.wait()


async def reset_within_an_event(call: Call, reply: Reply) -> None:
    """The connection breaks when half of an event was sent, although it was announced as a whole chunk."""
    reply.raw(b'1f\r\n: kllm-ids 9\n\ndata: {"choi')
    await asyncio.sleep(0.02)
    reply.cut()
    await call.closed.wait()


async def failure_event(call: Call, reply: Reply) -> None:
    """The engine says in the stream that it failed."""
    reply.chunk(b'data: {"error":{"object":"error","message":"out of memory","code":500}}\n\n')
    reply.chunk(b"data: [DONE]\n\n")
    reply.end()


async def abort_event(call: Call, reply: Reply) -> None:
    """The engine gives the request up without having been asked to."""
    finish = {"type": "abort"} if call.path == "/generate" else "abort"
    reply.chunk(written({"choices": [{"finish_reason": finish}]}) + b"data: [DONE]\n\n")
    reply.end()


async def early_end(call: Call, reply: Reply) -> None:
    """The response is complete, the stream is not."""
    reply.end()


async def silence(call: Call, reply: Reply) -> None:
    """Nothing more comes."""
    await call.closed.wait()


def parks(r: Router) -> Any:
    """A prefill instance's script: it parks at once, and answers when a decode instance was asked."""

    async def script(call: Call, reply: Reply) -> None:
        rid = call.body["rid"]
        r.fleet.tell(EventKind.PREFILL_DONE, rid=rid, prompt_tokens=len(PROMPT), cached_tokens=0)
        await until(lambda: any(c.body["rid"] == rid for engine in r.decodes for c in engine.calls))
        reply.json(200, {"id": rid})

    return script


async def said(r: Router, asked: EngineRequest, **options: Any) -> bytes:
    """The whole answer."""
    async with r.pairing.open(asked, **options) as exchange:
        return await rest_of(exchange)


async def rest_of(exchange: Exchange) -> bytes:
    if not exchange.streaming:
        return exchange.body
    return b"".join([part async for part in exchange.chunks()])


def failed_in(r: Router) -> set[str]:
    """Ids of instances that were judged as failing."""
    return {instance for instance, passed in r.fleet.judged if not passed}


async def error_of(r: Router, asked: EngineRequest, **options: Any) -> ApiError:
    """The error that a request ends with."""
    try:
        await said(r, asked, **options)
    except ApiError as error:
        return error
    raise AssertionError("the request was answered")


async def at_rest(r: Router) -> None:
    """Wait until nothing of any request is left anywhere."""
    await until(lambda: not r.client.active)
    await r.pairing.close()
    await until(lambda: all(call.closed.is_set() for e in (*r.prefills, *r.decodes) for call in e.calls))
    assert r.fleet.inflight == {}
    await until(lambda: r.fleet.watches == {})


def engines(r: Router, *decode_scripts: Any) -> None:
    """Give every engine its script."""
    for engine in r.prefills:
        engine.script = parks(r)
    for engine, script in zip(r.decodes, decode_scripts, strict=True):
        engine.script = script


def calls(engine: FakeEngine) -> list[dict[str, Any]]:
    return [call.body for call in engine.calls]
