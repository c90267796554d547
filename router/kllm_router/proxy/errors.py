"""What an engine's failure means to a client. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from kllm_router.interfaces import ApiError

SERVER_ERROR = "server_error"
_CLIENT_STATUSES = frozenset({400, 404, 413, 415, 422})
_CODES = {429: "rate_limit_exceeded", 503: "engine_unavailable", 504: "timeout"}
_MESSAGE_LIMIT = 2000
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""Time and source line that the grammar library puts before its words."""
_TRACE = "\n\n  File "
_GRAMMAR_DEAD_END = "Grammar accept_token failed"
_PARK_TIMEOUT = "no decode instance took the KV"


def unavailable(message: str, *, code: str = "engine_unavailable") -> ApiError:
    """503: another try may succeed."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=1.0)


def rate_limited(message: str, *, retry_after: float | None) -> ApiError:
    """429: there is too much to do, or this client has had its part."""
    return ApiError(429, message, type="rate_limit_error", code=_CODES[429], retry_after=retry_after)


def timed_out(message: str) -> ApiError:
    """504: it took longer than allowed."""
    return ApiError(504, message, type=SERVER_ERROR, code="timeout")


def bad_gateway(message: str) -> ApiError:
    """502: an engine answered with something that is of no use."""
    return ApiError(502, message, type=SERVER_ERROR, code="engine_error")


def no_such_model(name: str, models: Sequence[str]) -> ApiError:
    """404: the client asked for another model than those of the service."""
    there_are = ", ".join(f"`{model}`" for model in models)
    message = f"The model `{name[:200]}` does not exist; this service has {there_are}."
    return ApiError(404, message, param="model", code="model_not_found")


def from_engine(status: int, body: bytes, *, instance: str) -> ApiError:
    """Map an engine's error answer.

    Args:
        status: its HTTP status. What the client can mend is kept; all else becomes 502 or 503.
        body: SGLang's {"object": "error", "message", …}, {"error": {…}}, {"detail": …} or anything.
        instance: named in messages that are not the client's fault.
    """
    said = _said(body)
    message = str(said.get("message") or said.get("detail") or f"HTTP status {status}")
    message = _SOURCE_PLACE.sub("", message).partition(_TRACE)[0].strip()[:_MESSAGE_LIMIT]
    if _GRAMMAR_DEAD_END in message:
        return ApiError(400, "the grammar or JSON schema allows no further token", code="invalid_grammar")
    if _PARK_TIMEOUT in message:
        return unavailable(f"{instance}: no decode instance took the request in time", code="overloaded")
    if status in _CLIENT_STATUSES:
        param = said.get("param")
        return ApiError(status, message, param=param if isinstance(param, str) else None, code=_code(said))
    if status == 429:
        return rate_limited(message, retry_after=1.0)
    if status in {408, 503, 504}:
        return unavailable(f"{instance}: {message}")
    return bad_gateway(f"{instance}: {message}")


def from_stream(data: bytes, *, instance: str) -> ApiError:
    """Map an error that is the first event of a stream."""
    event = data.partition(b"\n\n")[0].removeprefix(b"data: ")
    said = _said(event)
    code = said.get("code")
    return from_engine(code if isinstance(code, int) and 400 <= code <= 599 else 500, event, instance=instance)


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that broke."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


def _said(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8", "replace").strip()
        return {"message": text} if text else {}
    if not isinstance(parsed, dict):
        return {}
    inner = parsed.get("error")
    if isinstance(inner, dict):
        return inner
    return {"message": inner} if isinstance(inner, str) else parsed


def _code(said: dict[str, Any]) -> str | None:
    code = said.get("code")
    return code if isinstance(code, str) else None
