"""Calls to an instance's agent: drain, switch of role, and the role of a slot."""

from __future__ import annotations

import grpc.aio

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role
from kllm_core.wire import ROLES
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError

_SWITCH_TIMEOUT_SECONDS = 60.0
_ASSUME_TIMEOUT_SECONDS = 10.0


async def drain(address: str, token: str, *, deadline_seconds: float) -> bool:
    """Drain an instance; whether it got empty before the deadline.

    Raises:
        SubstrateError: its agent cannot be reached or refused.
    """
    request = engine_pb2.DrainRequest(deadline_milliseconds=max(1, round(deadline_seconds * 1000)))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
        try:
            # The agent ends the stream at the deadline; the call's own is later, so that its last message arrives.
            async for progress in stub.Drain(request, metadata=call_metadata(token), timeout=deadline_seconds + 5.0):
                if progress.drained:
                    return True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False
            raise SubstrateError(f"agent {address} did not drain: {error.code().name}: {error.details()}") from error
    return False


async def switch_role(address: str, token: str, to: Role) -> float:
    """Switch the role of an empty instance; seconds that it took.

    Raises:
        StepRefusedError: it is not empty or cannot switch.
        SubstrateError: its agent cannot be reached or failed.
    """
    request = engine_pb2.SwitchRoleRequest(role=ROLES[to])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
        try:
            response = await stub.SwitchRole(request, metadata=call_metadata(token), timeout=_SWITCH_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            details = f"{error.code().name}: {error.details()}"
            if error.code() in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED}:
                raise StepRefusedError("CannotFlip", f"agent {address} does not switch roles: {details}") from error
            raise SubstrateError(f"agent {address} did not switch roles: {details}") from error
    return float(response.switch_seconds)


async def assume(address: str, token: str, role: Role) -> None:
    """Have a slot start its server. Nothing is done for one that starts or serves as that role already.

    Raises:
        StepRefusedError: it cannot.
        SubstrateError: its agent cannot be reached or failed.
    """
    request = engine_pb2.AssumeRequest(role=ROLES[role])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.Assume(request, metadata=call_metadata(token), timeout=_ASSUME_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            details = f"{error.code().name}: {error.details()}"
            if error.code() in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED}:
                raise StepRefusedError(
                    "CannotAssume", f"agent {address} does not start as {role}: {details}"
                ) from error
            raise SubstrateError(f"agent {address} did not start as {role}: {details}") from error
