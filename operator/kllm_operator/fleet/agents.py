"""Follows the agents of a fleet: facts and load of each instance, as its agent tells them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
import structlog

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.fleet import EngineLoad
from kllm_core.wire import load_values
from kllm_operator.fleet.stream import reports, sessions
from kllm_operator.fleet.told import Told

_CALL_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
"""Between two sessions with an agent; an agent is on this machine or in this cluster, and there is one of each."""

_log = structlog.get_logger(__name__)


class Agents:
    """Follows each agent that it is told of, until that is withdrawn.

    Args:
        token: fleet token.
        listener: called after each report that tells something else than the one before; must not wait or raise.
        interval_seconds: between two reports of one agent; three that are missing end the session.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        token: str,
        *,
        listener: Callable[[], None],
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = call_metadata(token)
        self._listener = listener
        self._interval = interval_seconds
        self._clock = clock
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._told: dict[str, Told] = {}

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by the id of its instance."""
        return self._told

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Follow exactly these agents: host:port by the id of the instance."""
        wanted = set(addresses.items())
        for key in self._tasks.keys() - wanted:
            self._tasks.pop(key).cancel()
            self._told.pop(key[0], None)
        for key in wanted - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._run(*key), name=f"agent {key[0]}")

    async def close(self) -> None:
        """Follow none any more."""
        tasks = list(self._tasks.values())
        self.follow({})
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, instance_id: str, address: str) -> None:
        said = ""

        def lost(error: grpc.aio.AioRpcError | TimeoutError) -> None:
            nonlocal said
            problem = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "Silent"
            # An agent that ends is nothing new to its substrate; one that answers with errors is a fault.
            level = _log.debug if problem in {"UNAVAILABLE", "CANCELLED", said} else _log.warning
            level("AgentDoesNotTell", instance=instance_id, agent=address, problem=problem, error=str(error))
            said = problem

        await sessions(address, partial(self._session, instance_id), lost=lost, pause_seconds=_PAUSE_SECONDS)

    async def _session(self, instance_id: str, channel: grpc.aio.Channel) -> None:
        stub: Any = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
        request = engine_pb2.WatchLoadRequest(interval_milliseconds=round(self._interval * 1000))
        call = stub.WatchLoad(request, metadata=self._metadata)
        facts, last = None, None
        async for report in reports(call, interval_seconds=self._interval):
            before, age = self._told.get(instance_id), report.age_seconds
            report.ClearField("sequence")
            report.ClearField("age_seconds")
            if report == last and facts is not None and before is not None:
                # An engine without work says the same each second; of thousands that is not worth a second reading.
                self._told[instance_id] = before.again(now=self._clock(), age_seconds=age)
                continue
            last = report
            is_failed = report.HasField("state") and report.state == engine_pb2.INSTANCE_STATE_FAILED
            fails_now = is_failed and (before is None or not before.failed)
            if facts is None or facts.incarnation != report.incarnation or fails_now:
                facts = await self._facts(stub)
            self._told[instance_id] = _told(facts, report, age_seconds=age, now=self._clock(), before=before)
            self._listener()

    async def _facts(self, stub: Any) -> engine_pb2.Instance | None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            facts: engine_pb2.Instance = await stub.GetInstance(
                engine_pb2.GetInstanceRequest(), metadata=self._metadata, timeout=_CALL_SECONDS
            )
            return facts
        return None


def _told(
    facts: engine_pb2.Instance | None,
    report: engine_pb2.LoadReport,
    *,
    age_seconds: float,
    now: float,
    before: Told | None,
) -> Told:
    failed, failed_at = "", None
    if report.HasField("state") and report.state == engine_pb2.INSTANCE_STATE_FAILED:
        failed = (facts.message if facts is not None else "") or "its agent gave it up"
        failed_at = now if before is None or before.failed_at is None else before.failed_at
    return Told(
        heard_at=now,
        incarnation=report.incarnation,
        failed=failed,
        failed_at=failed_at,
        load=_load(report, age_seconds),
        flippable=facts is not None and facts.flippable,
        pacing="" if facts is None else str(getattr(facts, "pacing", "")),
        context_tokens=(facts.context_tokens or None) if facts is not None else None,
        page_size=(facts.page_size if facts is not None else 0) or 16,
    )


def _load(report: engine_pb2.LoadReport, age_seconds: float) -> EngineLoad | None:
    """The load, or None as long as the engine has said nothing."""
    if not report.HasField("running_requests"):
        return None
    values: dict[str, Any] = load_values(report)
    return EngineLoad(age_seconds=age_seconds, **values)
