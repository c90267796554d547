"""Settings of the control loop, each with its unit, default and reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kllm_operator.fleet.levels import LevelSettings
from kllm_operator.fleet.snapshot import Trust
from kllm_operator.loop.crashes import RestartSettings
from kllm_operator.plan.settings import LoadSettings, OutlookSettings, PlannerSettings

_LEAST_TICK_SECONDS = 0.1
"""A decision takes some milliseconds; below this the loop would use a processor for nothing, since engines tell their
loads once a second."""


class SettingError(ValueError):
    """A setting that is not known or not possible; the message names it."""


@dataclass(frozen=True)
class LoopSettings:
    """How the loop runs."""

    tick_seconds: float = 5.0
    """Seconds between two decisions, 5; a load that crosses 1 does not wait for it. Shorter follows noise."""
    drain_seconds: float = 300.0
    """Seconds after which an instance that does not get empty may be stopped with what it has, 300. Shorter cuts long
    answers, which then go on elsewhere; longer keeps what nobody needs."""
    load: LoadSettings = field(default_factory=LoadSettings)
    outlook: OutlookSettings = field(default_factory=OutlookSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    restarts: RestartSettings = field(default_factory=RestartSettings)
    trust: Trust = field(default_factory=Trust)
    levels: LevelSettings = field(default_factory=LevelSettings)

    def __post_init__(self) -> None:
        if not self.tick_seconds >= _LEAST_TICK_SECONDS:
            raise ValueError(f"tick_seconds must be at least {_LEAST_TICK_SECONDS:g}, got {self.tick_seconds:g}")
        if not self.drain_seconds > 0:
            raise ValueError(f"drain_seconds must be above 0, got {self.drain_seconds:g}")

    def with_values(self, values: dict[str, float]) -> LoopSettings:
        """The same with some numbers changed, by their names in any of the parts.

        Raises:
            SettingError: there is no such setting, or its value is not possible.
        """
        names = ("load", "outlook", "planner", "restarts", "levels")
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        changes: dict[str, Any] = {}
        for name, value in values.items():
            holder = next((part for part, held in parts.items() if name in _numbers(held)), None)
            target = parts[holder] if holder is not None else self
            if name not in _numbers(target):
                known = sorted(n for each in (self, *parts.values()) for n in _numbers(each))
                raise SettingError(f"there is no setting {name!r}; there are {', '.join(known)}")
            number = _checked(name, value, whole=isinstance(getattr(target, name), int))
            try:
                if holder is None:
                    changes[name] = number
                else:
                    parts[holder] = replace(target, **{name: number})
            except ValueError as error:
                raise SettingError(f"{name}: {error}") from None
        try:
            return replace(self, **parts, **changes)
        except ValueError as error:
            raise SettingError(str(error)) from None


def _checked(name: str, value: float, *, whole: bool) -> int | float:
    if not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{name} must be a finite number of at least 0, got {value:g}")
    if whole and value != int(value):
        raise SettingError(f"{name} must be a whole number of at least 0, got {value:g}")
    return int(value) if whole else float(value)


def _numbers(settings: object) -> set[str]:
    return {
        each.name
        for each in fields(settings)  # type: ignore[arg-type]
        if isinstance(getattr(settings, each.name), int | float)
    }
