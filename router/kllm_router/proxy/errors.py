"""What an engine's failure means to a client. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from kllm_router.interfaces import ApiError

SERVER_ERROR = "server_error"
_CLIENT_STATUSES = frozenset({400, 404, 413, 415, 422})
_CODES = {429: "rate_limit_exceeded", 503: "engine_unavailable", 504: "timeout"}
_MESSAGE_LIMIT = 2000


def unavailable(message: str, *, code: str = "engine_unavailable") -> ApiError:
    """503: another try may succeed."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=1.0)


def timed_out(message: str) -> ApiError:
    """504: it took longer than allowed."""
    return ApiError(504, message, type=SERVER_ERROR, code="timeout")


def bad_gateway(message: str) -> ApiError:
    """502: an engine answered with something that is of no use."""
    return ApiError(502, message, type=SERVER_ERROR, code="engine_error")


def from_engine(status: int, body: bytes, *, instance: str) -> ApiError:
    """Map an engine's error answer.

    Args:
        status: its HTTP status. What the client can mend is kept; all else becomes 502 or 503.
        body: SGLang's {"object": "error", "message", …}, {"error": {…}}, {"detail": …} or anything.
        instance: named in messages that are not the client's fault.
    """
    said = _said(body)
    message = str(said.get("message") or said.get("detail") or f"HTTP status {status}")[:_MESSAGE_LIMIT]
    if status in _CLIENT_STATUSES:
        param = said.get("param")
        return ApiError(status, message, param=param if isinstance(param, str) else None, code=_code(said))
    if status == 429:
        return ApiError(429, message, type="rate_limit_error", code=_CODES[429], retry_after=1.0)
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
