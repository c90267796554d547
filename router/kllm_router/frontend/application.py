"""The OpenAI API and the router's own pages: what each route answers."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import structlog

from kllm_router.frontend.access_log import entry
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.http import HttpRequest, HttpResponse, Responder
from kllm_router.frontend.keys import bearer_of
from kllm_router.frontend.trace import read_trace
from kllm_router.interfaces import ApiError
from kllm_router.metrics import CONTENT_TYPE
from kllm_router.proxy import errors

if TYPE_CHECKING:
    from kllm_router.interfaces import EngineRequest, FleetView, Preparer, RequestSummary
    from kllm_router.metrics import RouterMetrics
    from kllm_router.proxy.exchange import Exchange
    from kllm_router.proxy.pairing import Pairing

_log = structlog.get_logger(__name__)

_MODELS = "/v1/models/"
_STATUS = "/kllm/v1/status"
"""Whoever has the fleet token may read it too."""
_GENERATE = frozenset({"/v1/chat/completions", "/v1/completions"})
_PROBES = frozenset({"/healthz", "/livez", "/readyz", "/readyz/router"})
_READ = frozenset({"/v1/models", "/metrics", _STATUS, *_PROBES})
_OPEN = frozenset({"/metrics", *_PROBES})
"""Routes that need no API key: probes and scrapers have none."""

_METRICS_SECONDS = 0.5
"""For so long the same page is given; scrapers come seconds apart."""
_DEADLINE = "x-kllm-timeout-seconds"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MOST_PATH = 200
_STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))


class RouterApplication:
    """Answers requests of clients.

    Attributes:
        stopping: the router takes requests no longer than it must; readiness tells it.

    Args:
        gate: who may come in, and how often; by default everyone.
        fleet_token: may read the status too.
    """

    def __init__(
        self,
        *,
        preparer: Preparer,
        pairing: Pairing,
        fleet: FleetView,
        metrics: RouterMetrics,
        gate: Gate | None = None,
        fleet_token: str = "",
    ) -> None:
        self.stopping = False
        self._preparer = preparer
        self._pairing = pairing
        self._fleet = fleet
        self._metrics = metrics
        self._gate = gate or Gate()
        self._fleet_token = fleet_token.encode()
        self._metrics_text = b""
        self._metrics_until = 0.0
        self._pages: dict[str, Callable[[], HttpResponse]] = {
            "/v1/models": self._models,
            "/healthz": _alive,
            "/livez": _alive,
            "/readyz": self._ready,
            "/readyz/router": self._router_ready,
            "/metrics": self._metrics_page,
            _STATUS: lambda: HttpResponse(200, orjson.dumps(self._fleet.status(), default=str)),
        }

    # --- see `kllm_router.frontend.connection.Application`

    def admit(self, request: HttpRequest) -> HttpResponse | None:
        """Refuse by route, method, key and content type, before the body is read."""
        request.trace = read_trace(request.headers)
        error = self._objection(request)
        if error is None:
            return None
        _request_id(request)  # from here on every use of this request names the same id
        self._answered(request, error.status)
        allow = _allowed(request.path)
        headers = [("allow", allow)] if error.status == 405 and allow else []
        return _rendered(error, [*headers, _request_id(request)])

    def refuse(self, error: ApiError) -> HttpResponse:
        """Answer what is not a request."""
        self._metrics.answered("invalid", error.status)
        return _rendered(error, [])

    def cut(self, responder: Responder) -> None:
        """Say why an answer in work ends now."""
        error = errors.unavailable("the router is stopping", code="router_stopping")
        if responder.started:
            responder.write(errors.error_event(error))
        else:
            responder.send(_rendered(error, []))
        responder.finished = True

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer an admitted request."""
        status, run = 500, _Run()
        try:
            status = await self._answer(request, responder, run)
        except ApiError as error:
            status = error.status
            responder.send(_rendered(error, [_request_id(request)]))
        except Exception:  # noqa: BLE001  logged, counted, and told to the client
            _log.exception("request failed", path=request.path)
            failure = ApiError(500, "the router failed; its log says why", type=errors.SERVER_ERROR)
            responder.send(_rendered(failure, [_request_id(request)]))
        except BaseException:
            status = 499
            raise
        finally:
            self._answered(request, status, run.summary)

    # --- inside

    def _answered(self, request: HttpRequest, status: int, summary: RequestSummary | None = None) -> None:
        self._metrics.answered(_endpoint(request.path), status)
        if self._gate.access_log is not None and request.path not in _OPEN:
            self._gate.access_log.add(
                entry(
                    request_id=request.headers.get("x-request-id", ""),
                    method=request.method,
                    path=request.path[:_MOST_PATH],
                    status=status,
                    seconds=time.monotonic() - request.arrived,
                    client=request.client,
                    key=request.key.name,
                    trace_id=request.trace.trace_id,
                    summary=summary,
                )
            )

    def _objection(self, request: HttpRequest) -> ApiError | None:
        path = request.path
        allow = _allowed(path)
        if not allow:
            return ApiError(404, f"there is no {path} here", code="not_found")
        if path not in _OPEN and not self._key_is_valid(request):
            return ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if request.method not in allow.split(", "):
            return ApiError(405, f"{request.method} is not allowed here; {allow} are", code="method_not_allowed")
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                return ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
            if request.headers.get("content-encoding", "identity").lower() != "identity":
                return ApiError(415, "compressed request bodies are not accepted", code="unsupported_media_type")
        return None

    def _key_is_valid(self, request: HttpRequest) -> bool:
        authorization = request.headers.get("authorization", "")
        key = self._gate.keys.find(authorization)
        if key is not None:
            request.key = key
            return True
        given = (bearer_of(authorization) or "").encode("latin-1", "replace")
        of_fleet = hmac.compare_digest(given, self._fleet_token)
        return of_fleet and bool(self._fleet_token) and request.path == _STATUS

    async def _answer(self, request: HttpRequest, responder: Responder, run: _Run) -> int:
        if request.method == "OPTIONS":
            responder.send(HttpResponse(204, headers=[("allow", _allowed(request.path)), _request_id(request)]))
            return 204
        if request.path in _GENERATE:
            with self._metrics.inflight.track_inprogress():
                return await self._generate(request, responder, run)
        if request.path.startswith(_MODELS):
            response = self._model(request.path.removeprefix(_MODELS))
        else:
            response = self._pages[request.path]()
        responder.send(response)
        return response.status

    async def _generate(self, request: HttpRequest, responder: Responder, run: _Run) -> int:
        deadline = _deadline(request)
        ticket = self._gate.limiter.enter(request.key)
        try:
            prepared = await self._preparer.prepare(request.path, request.body)
            ticket.take_prompt(len(prepared.input_ids))
            if ticket.key or request.trace.lines:
                prepared = replace(prepared, key=ticket.key, trace=request.trace.lines)
            return await self._run(request, responder, run, prepared=prepared, deadline_seconds=deadline)
        finally:
            ticket.leave(run.output_tokens)

    async def _run(
        self,
        request: HttpRequest,
        responder: Responder,
        run: _Run,
        *,
        prepared: EngineRequest,
        deadline_seconds: float | None,
    ) -> int:
        timing = request.headers.get("x-kllm-timing") == "1"
        exchange = run.exchange = self._pairing.open(
            prepared, arrived=request.arrived, timing=timing, deadline_seconds=deadline_seconds
        )
        async with exchange:
            headers = [*exchange.headers, _request_id(request)]
            if not exchange.streaming:
                responder.send(HttpResponse(200, exchange.body, exchange.content_type, headers))
                return 200
            return await self._stream(exchange, responder, headers)

    async def _stream(self, exchange: Exchange, responder: Responder, headers: list[tuple[str, str]]) -> int:
        responder.on_pause = exchange.pause
        responder.on_resume = exchange.resume
        responder.begin("text/event-stream; charset=utf-8", [*_STREAM_HEADERS, *headers])
        try:
            error = await exchange.relay(responder.write)
        except asyncio.CancelledError:
            if not exchange.complete:
                raise
            return 200  # a client may close as soon as it has read the end of its stream
        if error is not None:
            responder.write(errors.error_event(error))
            responder.keep_alive = False
        responder.end()
        return 200 if error is None else error.status

    def _models(self) -> HttpResponse:
        return HttpResponse(200, orjson.dumps({"object": "list", "data": self._preparer.models()}))

    def _model(self, name: str) -> HttpResponse:
        for model in self._preparer.models():
            if model.get("id") == name:
                return HttpResponse(200, orjson.dumps(model))
        raise errors.no_such_model(name, [str(model["id"]) for model in self._preparer.models()])

    def _ready(self) -> HttpResponse:
        if self.stopping:
            raise errors.unavailable("the router is stopping", code="router_stopping")
        if self._pairing.takes_requests:
            return HttpResponse(200, b'{"status":"ready"}')
        raise errors.unavailable("no prefill and decode instance take requests yet", code="not_ready")

    def _metrics_page(self) -> HttpResponse:
        """Anyone may ask, and a page takes milliseconds, so it is not made anew for each who asks."""
        now = time.monotonic()
        if now >= self._metrics_until:
            self._metrics_text, self._metrics_until = self._metrics.text(), now + _METRICS_SECONDS
        return HttpResponse(200, self._metrics_text, CONTENT_TYPE)

    def _router_ready(self) -> HttpResponse:
        """Whether requests may come here: a fleet that has failed is told by 503 with its reason, not by no answer."""
        if self.stopping:
            raise errors.unavailable("the router is stopping", code="router_stopping")
        if self._fleet.known:
            return HttpResponse(200, b'{"status":"ready"}')
        raise errors.unavailable("the instances are not known yet", code="not_ready")


class _Run:
    """What became of a request."""

    __slots__ = ("exchange",)

    def __init__(self) -> None:
        self.exchange: Exchange | None = None

    @property
    def summary(self) -> RequestSummary | None:
        return None if self.exchange is None else self.exchange.summary

    @property
    def output_tokens(self) -> int:
        return 0 if self.exchange is None else self.exchange.output_tokens


def _alive() -> HttpResponse:
    return HttpResponse(200, b'{"status":"ok"}')


def _allowed(path: str) -> str:
    if path in _GENERATE:
        return "POST, OPTIONS"
    if path in _READ or path.startswith(_MODELS):
        return "GET, HEAD, OPTIONS"
    return ""


def _endpoint(path: str) -> str:
    """The route as a metric label: one of a fixed set."""
    if path in _GENERATE or path in _READ:
        return path
    return "/v1/models/{id}" if path.startswith(_MODELS) else "other"


def _deadline(request: HttpRequest) -> float | None:
    """Seconds that the client will wait."""
    given = request.headers.get(_DEADLINE)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ApiError(400, f"{_DEADLINE}: must be a number of seconds above 0", param=_DEADLINE)
    return seconds


def _request_id(request: HttpRequest) -> tuple[str, str]:
    given = request.headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(given):
        # Written back, so that every use of this request names the same id.
        given = request.headers["x-request-id"] = secrets.token_hex(16)
    return "x-request-id", given


def _rendered(error: ApiError, headers: list[tuple[str, str]]) -> HttpResponse:
    if error.retry_after is not None:
        headers = [*headers, ("retry-after", str(max(1, round(error.retry_after))))]
    if error.status == 401:
        headers = [*headers, ("www-authenticate", "Bearer")]
    return HttpResponse(error.status, orjson.dumps(error.body()), headers=headers)
