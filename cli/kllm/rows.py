"""What is known of a service that is up, from its state, its router and its control loop."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from kllm_core.authentication import bearer, read_token_file
from kllm_operator.substrate.identity import members
from kllm_operator.substrate.rundir import RunDirectory, RunState

NOT_ANSWERING = "NotAnswering"
"""State of a router that does not answer."""

_TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class Row:
    """One process of a service; None is unknown.

    Attributes:
        kv_used_share: of the KV cache that requests hold.
        pss_bytes: memory of the process and its descendants, shared pages divided among their users.
        address: URL of a router, address of an instance's agent.
        grpc: host:port of a router's gRPC server.
        pacing: how long an engine's steps are made to last; empty when they are as they are.
        pools: of a router: both pools as the control loop sees them.
        silent: whether the router misses signs of life of its engine.
        ejected_seconds: for how long the router gives it nothing new, since it failed too often; None when it does.
    """

    service: str
    id: str
    role: str
    state: str | None
    running: int | None
    queued: int | None
    parked: int | None
    kv_used_share: float | None
    pid: int
    pss_bytes: int | None
    address: str | None
    grpc: str | None
    model: str
    uptime_seconds: float
    pacing: str | None = None
    pools: dict[str, dict[str, Any]] | None = None
    silent: bool | None = None
    ejected_seconds: float | None = None


@dataclass(frozen=True)
class Seen:
    """A service.

    Attributes:
        problems: what could not be found out, for people.
        is_sound: whether its router told its status.
    """

    rows: list[Row]
    problems: list[str]
    is_sound: bool


def look(service: str) -> Seen:
    """Ask everything about a service; what does not answer is left out and told."""
    run = RunDirectory(service)
    state = run.read_state()
    if state is None:  # it ended meanwhile
        return Seen([], [], is_sound=True)
    told, problem, router_state = _told_by_router(run, state)
    control, other_problem = _control(run)
    rows = _rows(run, state, told=told, control=control, router_state=router_state)
    problems = [each for each in (problem, other_problem) if each is not None]
    return Seen(rows, problems, is_sound=problem is None)


def _rows(
    run: RunDirectory, state: RunState, *, told: dict[str, Any], control: dict[str, Any], router_state: str
) -> list[Row]:
    memory = _memory(run, state)
    agents = _agents(run)
    rows = []
    for record in state.processes:
        instance = told.get(record.id, {})
        load = instance.get("load") or {}
        is_router, is_instance = record.kind == "router", record.kind in {"prefill", "decode"}
        controlled = control.get("instances", {}).get(record.id, {})
        other_state = None if is_instance else router_state if is_router else state.phase
        rows.append(
            Row(
                service=state.service,
                id=record.id,
                role=str(instance.get("role") or controlled.get("role") or record.kind),
                state=instance.get("state") or controlled.get("state") or other_state,
                running=load.get("running_requests"),
                queued=load.get("queued_requests"),
                parked=load.get("parked_requests"),
                kv_used_share=_share(load),
                pid=record.pid,
                pss_bytes=memory.get(record.id),
                address=state.url if is_router else agents.get(record.id),
                grpc=state.grpc if is_router else None,
                model=state.model,
                uptime_seconds=round(_uptime(record.started), 1),
                pacing=controlled.get("pacing"),
                pools=control.get("pools") if is_router else None,
                silent=instance.get("silent"),
                ejected_seconds=instance.get("ejected_seconds"),
            )
        )
    return sorted(rows, key=lambda row: row.id)


def _told_by_router(run: RunDirectory, state: RunState) -> tuple[dict[str, dict[str, Any]], str | None, str]:
    """What the router knows of each instance, why that is unknown, and the router's own state."""
    if state.url is None or state.phase == "Stopping":
        return {}, None, state.phase
    try:
        headers = {"authorization": bearer(read_token_file(run.token_file))}
        with httpx2.Client(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            response = client.get(f"{state.url}/kllm/v1/status", headers=headers)
        response.raise_for_status()
        instances = response.json()["instances"]
        return {str(instance["id"]): instance for instance in instances}, None, state.phase
    except httpx2.TransportError as error:
        why = f"the router of {state.service!r} is not answering at {state.url}: {error or type(error).__name__}"
        return {}, why, NOT_ANSWERING
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"the router of {state.service!r} does not tell its status: {error}", state.phase


def _agents(run: RunDirectory) -> dict[str, str]:
    try:
        document = json.loads(run.fleet_file.read_text(encoding="utf-8"))
        return {str(item["id"]): str(item["agent"]) for item in document["instances"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _control(run: RunDirectory) -> tuple[dict[str, Any], str | None]:
    """What the control loop last published, nothing before its first tick; and why it cannot be shown."""
    try:
        document = json.loads(run.control_file.read_text(encoding="utf-8"))
        _check_control(document)
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        why = f"{run.control_file} is not what the control loop writes there, so no pool is shown: {error}"
        return {}, why
    return document, None


def _check_control(document: Any) -> None:
    """See that everything is there that is shown.

    Raises:
        ValueError: it is not.
    """
    try:
        for instance in document["instances"].values():
            _check(instance, "pacing", str | None)
            _check(instance, "state", str)
            _check(instance, "role", str)
        for pool in document["pools"].values():
            _check(pool["load"], "term", str | None)
            for name in ("value", "predicted", "measured"):
                _check(pool["load"], name, int | float | None)
            for name in ("desired", "ready", "warming", "draining"):
                _check(pool, name, int)
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError("it has another shape" if isinstance(error, AttributeError) else str(error)) from error


def _check(holder: dict[str, Any], name: str, kinds: Any) -> None:
    if not isinstance(holder[name], kinds):
        raise TypeError(f"{name} is {holder[name]!r}")


def _memory(run: RunDirectory, state: RunState) -> dict[str, int]:
    """Bytes by process name. An engine is no child of its agent; ID.log is the agent's, ID.engine.log the engine's."""
    pss: dict[str, int] = defaultdict(int)
    for process in members(state.run_id, [record.identity for record in state.processes]):
        try:
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        if log.parent == run.log_file("x").parent:
            kilobytes = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
            pss[log.name.removesuffix(".log").removesuffix(".engine")] += 1024 * sum(kilobytes)
    return pss


def _uptime(started_ticks: int) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))


def _share(load: dict[str, Any]) -> float | None:
    used, total = load.get("kv_used_tokens"), load.get("kv_total_tokens")
    return round(used / total, 4) if used is not None and total else None
