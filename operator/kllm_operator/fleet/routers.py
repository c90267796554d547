"""Follows routers' service levels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import structlog

from kllm_core.authentication import call_metadata
from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_operator.fleet.levels import LevelReport, StageCounts
from kllm_operator.fleet.stream import reports, sessions

_PAUSE_SECONDS = 0.5
_NAMES = {
    router_pb2.STAGE_QUEUE: "queue",
    router_pb2.STAGE_PREFILL: "prefill",
    router_pb2.STAGE_BIND: "bind",
    router_pb2.STAGE_TRANSFER: "transfer",
    router_pb2.STAGE_TTFT: "ttft",
    router_pb2.STAGE_TPOT: "tpot",
    router_pb2.STAGE_PREFILLED: "prefilled",
    router_pb2.STAGE_HANDOVER: "handover",
}

_log = structlog.get_logger(__name__)


async def follow_router(
    address: str,
    token: str,
    take: Callable[[LevelReport], None],
    *,
    interval_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hand on each report of a router, until cancelled; a broken stream is opened again.

    Args:
        address: host:port of its gRPC server.
        token: fleet token.
        take: must not wait or raise.
        interval_seconds: between two reports; three that are missing break the stream.
        clock: monotonic seconds.
    """

    async def session(channel: grpc.aio.Channel) -> None:
        stub: Any = router_pb2_grpc.ServiceLevelsStub(channel)  # type: ignore[no-untyped-call]
        request = router_pb2.WatchServiceLevelsRequest(interval_milliseconds=round(interval_seconds * 1000))
        call = stub.WatchServiceLevels(request, metadata=call_metadata(token))
        async for report in reports(call, interval_seconds=interval_seconds):
            take(_report(report, clock()))

    def lost(error: grpc.aio.AioRpcError | TimeoutError) -> None:
        _log.debug("RouterDoesNotTell", router=address, error=str(error) or type(error).__name__)

    await sessions(address, session, lost=lost, pause_seconds=_PAUSE_SECONDS)


def _report(report: router_pb2.ServiceLevelReport, now: float) -> LevelReport:
    return LevelReport(
        router=report.router_id,
        at=now,
        seconds=report.interval_seconds,
        arrivals=report.arrivals,
        prompt_tokens=report.prompt_tokens,
        prompt_token_squares=report.prompt_token_squares,
        cached_tokens=report.cached_tokens,
        output_tokens=report.output_tokens,
        failed=report.failed,
        rejected=report.rejected,
        waiting=report.waiting,
        unshared=report.unshared,
        stages={
            _NAMES[each.stage]: StageCounts(tuple(each.counts), each.sum_seconds)
            for each in report.stages
            if each.stage in _NAMES
        },
    )
