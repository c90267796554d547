"""Generation over gRPC: kllm.router.v1.Router, over the same pairing as HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
import orjson

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_router.frontend.access_log import entry
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.grpc_requests import prepare_generate
from kllm_router.frontend.keys import EVERYONE, ApiKey
from kllm_router.frontend.trace import read_trace
from kllm_router.interfaces import ApiError
from kllm_router.proxy.exchange import CLIENT_LEFT

if TYPE_CHECKING:
    from kllm_router.frontend.openai import OpenAiPreparer
    from kllm_router.proxy.exchange import Exchange
    from kllm_router.proxy.pairing import Pairing

_PATH = "/kllm.router.v1.Router/Generate"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class RouterService(router_pb2_grpc.RouterServicer):
    """Answers Generate.

    Args:
        gate: as over HTTP.
    """

    def __init__(self, *, preparer: OpenAiPreparer, pairing: Pairing, gate: Gate | None = None) -> None:
        self._preparer = preparer
        self._pairing = pairing
        self._gate = gate or Gate()

    async def Generate(  # noqa: N802  the contract's name
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Stream one generation. When the call ends early, leaving the exchange frees both engines."""
        call = _Call(context)
        ticket, status, deltas = None, CLIENT_LEFT, Deltas()
        try:
            call.key = self._valid_key(call)
            ticket = self._gate.limiter.enter(call.key)
            prepared = await prepare_generate(self._preparer, request)
            ticket.take_prompt(len(prepared.input_ids))
            prepared = replace(prepared, key=ticket.key, trace=call.trace.lines)
            call.exchange = self._pairing.open(
                prepared, arrived=call.arrived, deadline_seconds=context.time_remaining()
            )
            async with call.exchange as exchange:
                yield router_pb2.GenerateResponse(
                    started=router_pb2.Started(request_id=prepared.rid, prompt_tokens=len(prepared.input_ids))
                )
                async for part in exchange.chunks():
                    for chunk in deltas.feed(part):
                        yield router_pb2.GenerateResponse(chunk=chunk)
                yield router_pb2.GenerateResponse(finished=_finished(exchange, deltas, len(prepared.input_ids)))
            status = 200
        except ApiError as error:
            status = error.status
            await _abort(context, error)
        finally:
            if ticket is not None:
                ticket.leave(deltas.completion_tokens)
            self._log(call, status)

    def _valid_key(self, call: _Call) -> ApiKey:
        key = self._gate.keys.find(call.headers.get("authorization", ""))
        if key is None:
            raise ApiError(401, "a valid API key is needed: metadata authorization: Bearer KEY", code="invalid_api_key")
        return key

    def _log(self, call: _Call, status: int) -> None:
        if self._gate.access_log is None:
            return
        summary = None if call.exchange is None else call.exchange.summary
        self._gate.access_log.add(
            entry(
                request_id="" if summary is None else summary.rid,
                method="gRPC",
                path=_PATH,
                status=status,
                seconds=time.monotonic() - call.arrived,
                client=call.peer,
                key=call.key.name,
                trace_id=call.trace.trace_id,
                summary=summary,
            )
        )


class _Call:
    """What is known of a call besides its message."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.arrived = time.monotonic()
        self.headers = {
            name: value.decode("latin-1") if isinstance(value, bytes) else value
            for name, value in context.invocation_metadata() or ()
        }
        self.peer = context.peer()
        self.trace = read_trace(self.headers)
        self.key = EVERYONE
        self.exchange: Exchange | None = None


@dataclass
class Deltas:
    """Reads the engine's stream, whose events hold all of the output so far, or (by a flag of the engine) what is new.

    Attributes:
        reason: why the engine ended: stop, length or abort.
        cached_tokens: as the decode instance tells it.
        first_at: when the first output came, on the monotonic clock.
        last_at: when the last one came.
    """

    reason: str = ""
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    _rest: bytes = b""
    _text: str = ""
    _tokens: int = 0

    def feed(self, data: bytes) -> list[router_pb2.Chunk]:
        """Take bytes of the stream and give what they add.

        Raises:
            ApiError: the engine told of an error, or sent something else than events.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [chunk for event in events if (chunk := self._take(event)) is not None]

    @property
    def per_output_token(self) -> float:
        """Mean gap after the first token; 0 with one token."""
        if self.first_at is None or self.completion_tokens < 2:
            return 0.0
        return (self.last_at - self.first_at) / (self.completion_tokens - 1)

    def _take(self, event: bytes) -> router_pb2.Chunk | None:
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            return None
        try:
            told = orjson.loads(event[6:])
        except orjson.JSONDecodeError as error:
            raise ApiError(502, f"the engine sent an event that is not JSON: {error}", type="server_error") from error
        if "error" in told:
            raise _engine_error(told["error"])
        meta = told.get("meta_info") or {}
        ids, text = told.get("output_ids") or [], told.get("text") or ""
        self._mark(meta)
        if len(ids) == self.completion_tokens:
            # All so far. A stop string may have taken text back, which is not told again.
            ids, text, whole = ids[self._tokens :], text[len(self._text) :], text
            self._text = whole if len(whole) > len(self._text) else self._text
        self._tokens += len(ids)
        return router_pb2.Chunk(text=text, token_ids=ids) if ids or text else None

    def _mark(self, meta: dict[str, Any]) -> None:
        self.last_at = time.monotonic()
        if self.first_at is None:
            self.first_at = self.last_at
        self.completion_tokens = meta.get("completion_tokens", self.completion_tokens)
        self.cached_tokens = meta.get("cached_tokens") or self.cached_tokens
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            self.reason = str(reason.get("type", ""))


def _engine_error(told: object) -> ApiError:
    message = told.get("message") if isinstance(told, dict) else told
    code = told.get("code") if isinstance(told, dict) else None
    status = code if isinstance(code, int) and code in _CODES else 502
    return ApiError(status, str(message), type="server_error")


def _finished(exchange: Exchange, deltas: Deltas, prompt_tokens: int) -> router_pb2.Finished:
    times = exchange.times
    stages = router_pb2.StageTimes(
        queue=times.queue or 0.0,
        prefill=times.prefill or 0.0,
        bind=times.bind or 0.0,
        transfer=times.transfer or 0.0,
        first_token=times.first_token or 0.0,
        per_output_token=deltas.per_output_token,
    )
    return router_pb2.Finished(
        reason=deltas.reason or "abort",
        prompt_tokens=prompt_tokens,
        cached_tokens=exchange.progress.cached_tokens or deltas.cached_tokens,
        completion_tokens=deltas.completion_tokens,
        times=stages,
        prefill_instance=exchange.prefill.endpoint.instance_id if exchange.prefill is not None else "",
        decode_instance=exchange.decode.endpoint.instance_id if exchange.decode is not None else "",
    )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ApiError) -> NoReturn:
    trailing = [("kllm-error-code", error.code or error.type)]
    if error.param is not None:
        trailing.append(("kllm-error-param-bin", error.param.encode()))  # type: ignore[arg-type]
    if error.retry_after is not None:
        trailing.append(("retry-after", f"{error.retry_after:g}"))
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, tuple(trailing))
    raise AssertionError("abort raises")
