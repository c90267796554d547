"""Refuses calls that do not carry the fleet token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from kllm_core.authentication import metadata_is_valid

_OPEN_PREFIX = "/grpc.health.v1.Health/"
_MESSAGE = "metadata `authorization` must be `Bearer` and the fleet token"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets health checks pass, and every other call only with the token.

    Args:
        token: fleet token.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        if metadata_is_valid(handler_call_details.invocation_metadata, self._token):
            return handler
        return _refusing(handler)


def _refusing(handler: Handler) -> Handler:
    """A handler of the same shape, so that a streaming call is refused in its own protocol."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _MESSAGE)

    async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _MESSAGE)
        yield None

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
