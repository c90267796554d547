"""Puts together what one control loop decided from, tick by tick."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kllm_operator.fleet.levels import LevelReport
from kllm_operator.history.moment import Moment
from kllm_operator.loop.report import Report


class Ticks(ABC):
    """Hears routers and the loop; what becomes of a tick is its subclass's."""

    def __init__(self) -> None:
        self._levels: list[LevelReport] = []

    def hear(self, report: LevelReport) -> None:
        """A router has told something."""
        self._levels.append(report)

    def publish(self, report: Report, *, complete: bool) -> None:
        """A tick has ended.

        Args:
            report: of the loop.
            complete: no router is silent.
        """
        levels, self._levels = tuple(self._levels), []
        seen = report.snapshot
        self._keep(
            Moment(seen.fleet.taken_at, report.desired, seen.observed, dict(report.told), levels, complete=complete)
        )

    @abstractmethod
    def _keep(self, moment: Moment) -> None:
        """Write a tick down; what cannot be written must not end the loop."""
