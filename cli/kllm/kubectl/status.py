"""`kubectl kllm status`: services, or one with its pools and instances."""

from __future__ import annotations

import datetime as dt
import sys

from kllm.kubectl.cells import age, counts, kv_share, load, milli, seconds, text
from kllm.kubectl.forms import Output
from kllm.kubectl.kubectl import Kubectl
from kllm.kubectl.output import document, print_told
from kllm.kubectl.router import told_by_router
from kllm.kubectl.services import Instance, Service, find_instances, find_services
from kllm.tables import new_console, new_table
from kllm_core.conditions import ConditionType
from kllm_core.kinds.status import ConditionStatus
from kllm_core.objectives import Role


def run(kubectl: Kubectl, name: str | None, output: Output | None) -> int:
    """Show one service, or all; returns 0.

    Raises:
        PluginError: they cannot be had.
    """
    services = find_services(kubectl, name)
    if output is Output.NAME:
        for each in services:
            print(f"inferenceservice.kllm.io/{each.name}")
        return 0
    if name is not None:
        _show_one(kubectl, services[0], output)
    elif output in {Output.JSON, Output.YAML}:
        print_told([document(each) for each in services], output)
    elif services:
        _print_services(services, wide=output is Output.WIDE, with_namespace=kubectl.all_namespaces)
    else:
        print("no InferenceService found", file=sys.stderr)
    return 0


def ready(service: Service) -> str:
    """Whether it serves; when it does not, why."""
    condition = service.condition(ConditionType.READY)
    if condition is None:
        return "Unknown"
    return "True" if condition.status is ConditionStatus.TRUE else condition.reason


def _show_one(kubectl: Kubectl, service: Service, output: Output | None) -> None:
    inside = kubectl.inside(service.namespace)
    told, problem = told_by_router(inside, service)
    instances = find_instances(inside, service, told)
    if output in {Output.JSON, Output.YAML}:
        print_told(document(service) | {"instances": [document(each) for each in instances]}, output)
    else:
        _print_services([service], wide=output is Output.WIDE, with_namespace=True)
        print()
        _print_pools(service)
        print()
        _print_instances(instances, wide=output is Output.WIDE)
    if problem:
        print(f"kubectl kllm: {problem}", file=sys.stderr)


def _print_services(services: list[Service], *, wide: bool, with_namespace: bool) -> None:
    now = dt.datetime.now(dt.UTC)
    space = ("NAMESPACE",) if with_namespace else ()
    more = ("SCALING", "PAUSED", "TTFT", "TPOT", "URL") if wide else ()
    table = new_table(
        *space, "NAME", "MODEL", "READY", "PREFILL", "LOAD", "DECODE", "LOAD", "ROUTERS", "AGE", *more,
        texts=3 + len(space),
    )  # fmt: skip
    for each in services:
        prefill, decode, router = each.pool(Role.PREFILL), each.pool(Role.DECODE), each.status.router
        objectives = each.spec.get("objectives") or {}
        last = (
            each.scaling.value, "yes" if each.paused else "no", f"{objectives.get('ttftMilliseconds', '-')} ms",
            f"{objectives.get('tpotMilliseconds', '-')} ms", text(each.status.url),
        )  # fmt: skip
        table.add_row(
            *((each.namespace,) if with_namespace else ()), each.name, each.model,
            ready(each) + (" (paused)" if each.paused else ""),
            counts(prefill), load(prefill.load), counts(decode), load(decode.load),
            "-" if router is None else f"{router.ready}/{router.desired}", age(each.created, now),
            *(last if wide else ()),
        )  # fmt: skip
    new_console().print(table)


def _print_pools(service: Service) -> None:
    table = new_table(
        "POOL", "LIMITED BY", "LOAD", "PREDICTED", "MEASURED", "DESIRED", "READY", "WARMING", "DRAINING", "FAILED",
        "SLOTS", "OUTDATED", "LAST START", texts=2,
    )  # fmt: skip
    for role in Role:
        pool = service.pool(role)
        loads = (pool.load.value_milli, pool.load.predicted_milli, pool.load.measured_milli)
        numbers = (pool.desired, pool.ready, pool.warming, pool.draining, pool.failed, pool.slots, pool.outdated)
        table.add_row(
            role.value, text(pool.load.term), *map(milli, loads), *map(str, numbers), seconds(pool.start_milliseconds)
        )
    new_console().print(table)


def _print_instances(instances: list[Instance], *, wide: bool) -> None:
    now = dt.datetime.now(dt.UTC)
    more = ("NODE", "ADDRESS", "REVISION", "REQUESTED", "MESSAGE") if wide else ()
    table = new_table("INSTANCE", "ROLE", "STATE", "RUNNING", "QUEUED", "PARKED", "KV", "AGE", *more, texts=3)
    for each in instances:
        numbers = (each.load.get(f"{name}_requests") for name in ("running", "queued", "parked"))
        last = (each.node, each.address, each.revision, each.requested, each.message)
        table.add_row(
            each.name, each.role, each.state, *map(text, numbers), kv_share(each.load), age(each.created, now),
            *(map(text, last) if wide else ()),
        )  # fmt: skip
    new_console().print(table)
