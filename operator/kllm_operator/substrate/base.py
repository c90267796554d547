"""What every substrate can do: carry out one step for one instance, and tell what is there."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom


@dataclass(frozen=True)
class Observed:
    """One instance as the substrate sees it; what the engine says of itself comes from its agent.

    Attributes:
        agent: host:port of its agent; None until that is known.
        message: why it is in this state, for people.
        age_seconds: since the step that made it.
    """

    id: str
    role: Role
    state: InstanceState
    agent: str | None
    message: str
    age_seconds: float


class Substrate(abc.ABC):
    """Carries out steps. Each method is one of `kllm_core.steps`; all but `observe` raise SubstrateError."""

    @abc.abstractmethod
    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        """Begin one more instance and return its id; it serves later, or turns Failed, which `observe` tells."""

    @abc.abstractmethod
    async def cancel(self, instance_id: str) -> None:
        """Give up an instance that does not serve yet, at once.

        Raises:
            StepRefusedError: it serves already; drain and stop it instead.
        """

    @abc.abstractmethod
    async def drain(self, instance_id: str, *, deadline_seconds: float) -> bool:
        """Let an instance take nothing new and finish what it has.

        Returns:
            Whether it is empty; False when the deadline passed first.
        """

    @abc.abstractmethod
    async def stop(self, instance_id: str) -> None:
        """End an instance, whatever its state, and leave nothing of it."""

    @abc.abstractmethod
    async def flip(self, instance_id: str, to: Role) -> None:
        """Let a drained instance serve the other role.

        Raises:
            StepRefusedError: it is not empty, or its engine cannot switch roles.
        """

    @abc.abstractmethod
    async def observe(self) -> Sequence[Observed]:
        """All instances that were started and not stopped, in the order of their ids."""
