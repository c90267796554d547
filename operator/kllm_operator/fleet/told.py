"""What an agent said of its instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kllm_core.fleet import EngineLoad


@dataclass(frozen=True)
class Told:
    """What an agent last said.

    Attributes:
        heard_at: seconds on the owner's clock.
        failed: why the agent holds its engine for dead or hung; empty when it does not.
        failed_at: since when it does; None when it does not.
        load: with the age that it had when it was sent.
        pacing: how long steps are made to last; empty when they are as they are.
    """

    heard_at: float
    incarnation: int = 0
    failed: str = ""
    failed_at: float | None = None
    load: EngineLoad | None = None
    flippable: bool = False
    pacing: str = ""
    context_tokens: int | None = None
    page_size: int = 16

    def again(self, *, now: float, age_seconds: float) -> Told:
        """The same, said once more.

        Args:
            now: seconds on the owner's clock.
            age_seconds: that the load had when it was sent.
        """
        load = None if self.load is None else replace(self.load, age_seconds=age_seconds)
        return replace(self, heard_at=now, load=load)
