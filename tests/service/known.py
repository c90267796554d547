"""What may be known of a service, for tests of what is told of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from service.service_world import service

from kllm_core.fleet import InstanceState
from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Load, Role
from kllm_core.steps import DesiredCounts, StepDecision
from kllm_operator.loop.report import PoolReport, Report
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.service.facts import Facts, Routers
from kllm_operator.substrate.base import Observed


def instance(role, state=InstanceState.SERVING, reason="", number=0, **more):
    name = f"chat-engine-{role}{number}"
    return Observed(name, role, state, None, reason or "told", 1.0, reason=reason, **more)


BOTH = [instance(role) for role in Role]


def load(role, value=None):
    return RoleLoad(role, 1, Load.of(predicted=value, measured=None), value, None, complete=value is not None, terms=())


def report(observed, *, value=None, desired=(1, 1), reason="Steady", limited=None, pools=None):
    snapshot = SimpleNamespace(observed=tuple(observed))
    empty = PoolReport(
        desired=1, ready=0, warming=0, draining=0, failed=0, slots=0, slots_wanted=0, slots_warming=0, outdated=0,
        held_back=None, stopped=None, last_failure=None, trouble=None, last_start=None,
    )  # fmt: skip
    return Report(
        DesiredCounts(*desired, reason, "told"), None, tuple(load(role, value) for role in Role), snapshot, {},
        paused=False, idle=StepDecision(None, "Converged", "all is there"), limited=limited,
        pools={role: replace(empty, **(pools or {})) for role in Role}, requests={},
    )  # fmt: skip


def facts(observed=None, **more):
    if observed is None:
        observed = BOTH
    values = {
        "generation": 3,
        "service": check_service(service()),
        "report": report(observed),
        "routers": Routers(desired=1, ready=1, knows_fleet=True),
    }
    return Facts(**(values | more))
