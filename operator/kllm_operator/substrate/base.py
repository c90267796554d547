"""What every substrate can do: carry out one step for one instance, and tell what is there."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Request, StartFrom


@dataclass(frozen=True)
class StartPhase:
    """One part of a start, and the seconds that it took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Observed:
    """One instance as the substrate sees it; what the engine says of itself comes from its agent.

    Attributes:
        agent: host:port of its agent; None until that is known.
        message: why it is in this state, for people.
        age_seconds: since the step that made it.
        drained: its agent said that it is empty, after it was asked to drain.
        overdue: it did not get empty before the deadline of its drain, or its agent did not answer.
        ending: it is being ended; it is told of until it is gone.
        slot: it is a slot of its role's pool, or is to become one; not an instance before it is started.
        revision: what it was made from; empty where there is one revision only.
        outdated: a start in its role would make another revision.
        phases: of its start, as far as they are over.
        requested: what a person asks of it.
        reason: CamelCase, what is wrong with it, for conditions; empty when nothing is.
        draining_to: the role that it shall have once it is drained; None for one that leaves.
        vouched: another than this process asks its agent, and has an answer: silence is the way's fault, not its own.
    """

    id: str
    role: Role
    state: InstanceState
    agent: str | None
    message: str
    age_seconds: float
    drained: bool = False
    overdue: bool = False
    ending: bool = False
    slot: bool = False
    revision: str = ""
    outdated: bool = False
    phases: tuple[StartPhase, ...] = ()
    requested: Request | None = None
    reason: str = ""
    vouched: bool = False
    draining_to: Role | None = None


class Substrate(abc.ABC):
    """Carries out steps. Each coroutine is one of `kllm_core.steps`; all but `observe` raise SubstrateError.

    A step may be asked for again, and whoever waits for it may be cancelled: what was begun goes on, and asking again
    waits for the same end. `observe` tells of a step as soon as it was asked for.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each change of what `observe` tells. It must not wait or raise."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def revision(self, role: Role) -> str:
        """Of what a start in a role makes; where it is equal, an instance of one role may become one of the other."""
        del role
        return ""

    @abc.abstractmethod
    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        """Begin one more instance and return its id; it serves later, or turns Failed, which `observe` tells.

        Raises:
            StepRefusedError: there is no slot of the present revision to start it from.
        """

    @abc.abstractmethod
    async def add_slot(self, role: Role) -> str:
        """Begin one more slot of a role's pool and return its id.

        Raises:
            StepRefusedError: there are no slots here.
        """

    @abc.abstractmethod
    async def cancel(self, instance_id: str) -> None:
        """Give up a slot, or an instance that does not serve yet, at once. Nothing is done for one that is gone.

        Raises:
            StepRefusedError: it serves already; drain and stop it instead.
        """

    @abc.abstractmethod
    async def drain(self, instance_id: str, *, deadline_seconds: float, to: Role | None = None) -> bool:
        """Let an instance take nothing new and finish what it has.

        Args:
            instance_id: of one that serves.
            deadline_seconds: that it has.
            to: the role that it shall have then, which `observe` tells for as long as it drains; None: it leaves.

        Returns:
            Whether it is empty; False when the deadline passed first.

        Raises:
            StepRefusedError: it does not serve.
        """

    @abc.abstractmethod
    async def stop(self, instance_id: str) -> None:
        """End an instance, whatever its state, and leave nothing of it. Nothing is done for one that is gone."""

    @abc.abstractmethod
    async def flip(self, instance_id: str, to: Role) -> float:
        """Let a drained instance serve the other role. Nothing is done for one that serves it already.

        Returns:
            Seconds that the switch took; 0 when there was nothing to do.

        Raises:
            StepRefusedError: it is not empty, or its engine cannot switch roles; it stays drained.
            SubstrateError: the switch failed; the instance is to be stopped.
        """

    async def dismiss(self, instance_id: str) -> None:
        """Forget what a person asked of an instance, since it cannot be done."""
        del instance_id

    @abc.abstractmethod
    async def observe(self) -> Sequence[Observed]:
        """All instances that were started and are not gone, in the order of their ids."""
