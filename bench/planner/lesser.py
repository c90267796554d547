"""The planner without one of its parts, for as long as a simulation takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

from kllm_core.objectives import Load, Role
from kllm_operator.plan.demand import Forecast
from kllm_operator.plan.outlook import Outlook

_OF = Load.of


def _measured_only(*, predicted: float | None, measured: float | None) -> Load:
    # A load of 0 is no traffic, or a role that this pool does not have: known without any prediction.
    return _OF(predicted=None if predicted else predicted, measured=measured)


def _predicted_only(*, predicted: float | None, measured: float | None) -> Load:  # noqa: ARG001
    return _OF(predicted=predicted, measured=None)


def _present(_: Outlook, role: Role, present: Forecast, *, lasting: bool, spare: float) -> Forecast:  # noqa: ARG001
    return present


_LESSER: Mapping[str, tuple[type, str, Callable[..., object]]] = {
    "predictions": (Load, "of", _measured_only),
    "measurements": (Load, "of", _predicted_only),
    "forecast": (Outlook, "asked", _present),
}


@contextlib.contextmanager
def without(part: str | None) -> Iterator[None]:
    """Take one part away: `predictions`, `measurements` or `forecast`; None leaves all."""
    if part is None:
        yield
        return
    owner, name, instead = _LESSER[part]
    with mock.patch.object(owner, name, instead):
        yield
