"""`kubectl kllm top`: what the engines do, again and again."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from kllm.kubectl.cells import kv_share, load, text
from kllm.kubectl.exceptions import KubectlError
from kllm.kubectl.kubectl import Document, Kubectl
from kllm.kubectl.router import told_by_router
from kllm.kubectl.services import Service, find_instances, find_services
from kllm.tables import new_console, new_table
from kllm_core.objectives import Role

if TYPE_CHECKING:
    from rich.console import RenderableType


def run(kubectl: Kubectl, name: str | None, *, once: bool, every_seconds: float) -> int:
    """Show the load of one service, or of all, until Ctrl-C or once; returns 1 when once and a router does not answer.

    Raises:
        PluginError: services cannot be had.
    """
    if once or not sys.stdout.isatty():
        view, problems = _view(kubectl, name)
        new_console().print(view)
        for problem in problems:
            print(f"kubectl kllm: {problem}", file=sys.stderr)
        return 1 if problems else 0
    from rich.live import Live  # noqa: PLC0415 - only a terminal pays for it

    with Live(console=new_console(), auto_refresh=False, screen=False) as live:
        try:
            while True:
                try:
                    view, problems = _view(kubectl, name)
                    live.update(_with_problems(view, problems), refresh=True)
                except KubectlError as error:  # the next look may go better
                    live.update(f"kubectl kllm: {error}", refresh=True)
                time.sleep(every_seconds)
        except KeyboardInterrupt:
            return 0


def _view(kubectl: Kubectl, name: str | None) -> tuple[RenderableType, list[str]]:
    """Tables, and what could not be found out."""
    from rich.console import Group  # noqa: PLC0415 - with the tables

    parts: list[RenderableType] = []
    problems: list[str] = []
    for service in find_services(kubectl, name):
        inside = kubectl.inside(service.namespace)
        told, problem = told_by_router(inside, service)
        if problem:
            pods = find_instances(inside, service, {})
            told = {each.name: {"id": each.name, "role": each.role, "state": each.state} for each in pods}
        parts += [_heading(service), _table(told)]
        problems += [problem] if problem else []
    return Group(*parts), problems


def _with_problems(view: RenderableType, problems: list[str]) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415 - with the tables

    return Group(view, *problems)


def _heading(service: Service) -> str:
    pools = [(role, service.pool(role)) for role in Role]
    said = ", ".join(f"{role} {pool.ready}/{pool.desired} load {load(pool.load)}" for role, pool in pools)
    return f"{service.namespace}/{service.name}: {said}"


def _table(told: dict[str, Document]) -> RenderableType:
    table = new_table(
        "INSTANCE", "ROLE", "STATE", "RUNNING", "QUEUED", "PARKED", "KV", "PREFILL TOK/S", "DECODE TOK/S", "STEP MS",
        "CACHED BLOCKS", texts=3,
    )  # fmt: skip
    for each in sorted(told.values(), key=lambda each: (str(each.get("role")), str(each.get("id")))):
        known: dict[str, Any] = each.get("load") or {}
        step = known.get("decode_step_seconds") or known.get("prefill_step_seconds")
        table.add_row(
            text(each.get("id")), text(each.get("role")), text(each.get("state")),
            *(text(known.get(f"{name}_requests")) for name in ("running", "queued", "parked")), kv_share(known),
            _whole(known.get("prefill_tokens_per_second")), _whole(known.get("decode_tokens_per_second")),
            _whole(None if step is None else 1000 * step), text(each.get("cached_blocks")),
        )  # fmt: skip
    return table


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
