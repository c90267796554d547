"""What agents say of pods that are not settled: those that start, and slots on their way.

What serves is followed by the fleet's watch, and what the kubelet knows is in the pod; the way to both is heard here,
within a tenth of a second instead of a kubelet's probe or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
import structlog

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.wire import ROLE_OF, STATE_OF
from kllm_operator.fleet.stream import reports, sessions
from kllm_operator.substrate.base import StartPhase

_INTERVAL_SECONDS = 1.0
_PAUSE_SECONDS = 0.3
"""Between two tries: an agent listens a second or two after its container runs."""
_CALL_SECONDS = 5.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Word:
    """What an agent last said.

    Attributes:
        role: None for a slot.
        message: why it is in this state.
        phases: of the start, once it serves.
    """

    state: InstanceState
    role: Role | None = None
    message: str = ""
    phases: tuple[StartPhase, ...] = ()


class AgentWords:
    """Listens to agents, by the uid of their pods.

    Args:
        token: fleet token.
        listener: called after each word that is news; must not wait or raise.
    """

    def __init__(self, token: str, *, listener: Callable[[], None]) -> None:
        self._metadata = call_metadata(token)
        self._listener = listener
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._words: dict[str, Word] = {}

    def of(self, uid: str) -> Word | None:
        """The last word of a pod's agent."""
        return self._words.get(uid)

    def say(self, uid: str, word: Word) -> None:
        """Take a word that was heard elsewhere."""
        if self._words.get(uid) != word:
            self._words[uid] = word
            self._listener()

    def forget(self, uid: str) -> None:
        """What was said is no longer so."""
        self._words.pop(uid, None)

    def keep(self, uids: frozenset[str]) -> None:
        """Forget all others."""
        self._words = {uid: word for uid, word in self._words.items() if uid in uids}

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Listen to exactly these: host:port by uid."""
        wanted = set(addresses.items())
        for key in self._tasks.keys() - wanted:
            self._tasks.pop(key).cancel()
        for key in wanted - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._run(*key), name=f"agent of pod {key[0]}")

    async def close(self) -> None:
        """Listen to none any more."""
        tasks = list(self._tasks.values())
        self.follow({})
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, uid: str, address: str) -> None:
        said = ""

        def lost(error: grpc.aio.AioRpcError | TimeoutError) -> None:
            nonlocal said
            problem = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "Silent"
            # One that does not listen yet is nothing new; one that answers with errors is a fault.
            level = _log.debug if problem in {"UNAVAILABLE", "CANCELLED", said} else _log.warning
            level("AgentDoesNotTell", pod=uid, agent=address, problem=problem, error=str(error))
            said = problem

        await sessions(address, partial(self._session, uid), lost=lost, pause_seconds=_PAUSE_SECONDS)

    async def _session(self, uid: str, channel: grpc.aio.Channel) -> None:
        stub: Any = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
        request = engine_pb2.WatchLoadRequest(interval_milliseconds=round(_INTERVAL_SECONDS * 1000))
        call = stub.WatchLoad(request, metadata=self._metadata)
        async for report in reports(call, interval_seconds=_INTERVAL_SECONDS):
            state = STATE_OF.get(report.state)
            if state is None:
                continue
            phases = await self._phases(stub) if state is InstanceState.SERVING else ()
            self.say(uid, Word(state, ROLE_OF.get(report.role), report.message, phases))

    async def _phases(self, stub: Any) -> tuple[StartPhase, ...]:
        try:
            facts = await stub.GetInstance(
                engine_pb2.GetInstanceRequest(), metadata=self._metadata, timeout=_CALL_SECONDS
            )
        except grpc.aio.AioRpcError:
            return ()  # it serves, whatever its start took
        return tuple(StartPhase(phase.name, phase.seconds) for phase in facts.start_phases)
