"""`kllm explain`: why a service, or a simulation at some time, has the instances that it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kllm.argument import Account, argued
from kllm.finding import find
from kllm_operator.substrate.exceptions import RunDirectoryError
from kllm_operator.substrate.rundir import RunDirectory

_MAXIMUM_BYTES = 1 << 30


class ExplainError(ValueError):
    """There is nothing to explain; the text says why."""


def run(name: str | None, *, outcome: Path | None, at: float | None, policy: str | None) -> int:
    """Returns 0 with an explanation, 2 when there is nothing to explain.

    Args:
        name: of a service that is up on this machine; None: the only one.
        outcome: what `kllm simulate --json` wrote; None: a service that is up.
        at: seconds of the simulation; None: its last decision.
        policy: which of several simulations.
    """
    if outcome is None and (at is not None or policy is not None):
        print("kllm: --at and --policy go with --outcome", file=sys.stderr)
        return 2
    try:
        told = _of_service(name) if outcome is None else _of_outcome(_chosen(_read(outcome), policy), at)
        lines = list(argued(told))
    except (ExplainError, RunDirectoryError) as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = outcome or "what the control loop published"
        print(f"kllm: {what} has another shape than expected: {error!r}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _of_service(name: str | None) -> Account:
    found = find(name)
    if len(found.up) > 1:
        raise ExplainError(f"several services are up ({', '.join(found.up)}); name one: kllm explain NAME")
    if not found.up:
        raise ExplainError(found.lost[0].text if found.lost else found.nothing(name))
    run = RunDirectory(found.up[0])
    try:
        document = json.loads(run.control_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExplainError(f"service {run.service!r} has decided nothing yet") from None
    except (OSError, ValueError) as error:
        raise ExplainError(f"{run.control_file} cannot be read: {error}") from error
    pools = document["pools"]
    advised = all(pool["advised"] is not None for pool in pools.values())
    return Account(
        title=run.service,
        desired={role: pool["advised"] if advised else pool["desired"] for role, pool in pools.items()},
        reason=document["reason"],
        message=document["message"],
        serving={role: pool["ready"] for role, pool in pools.items()},
        starting={role: pool["warming"] for role, pool in pools.items()},
        draining={role: pool["draining"] for role, pool in pools.items()},
        why=document["why"],
        advice=advised,
        waits_for=_waiting(document["waits_for"]),
        paused=document["paused"],
    )


def _waiting(told: dict[str, str]) -> str:
    return "" if told["reason"] == "Converged" else f"{told['message']} ({told['reason']})"


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAXIMUM_BYTES:
            raise ExplainError(f"{path} is larger than {_MAXIMUM_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, ExplainError) else ExplainError(f"{path} cannot be read: {error}") from error


def _chosen(document: Any, policy: str | None) -> dict[str, Any]:
    runs = document if isinstance(document, list) else [document]
    if not all(isinstance(each, dict) and "decisions" in each for each in runs):
        raise ExplainError("this is not what `kllm simulate --json` writes: it has no decisions")
    names = [each["policy"] for each in runs]
    chosen = [each for each in runs if policy in {None, each["policy"]}]
    if len(chosen) != 1:
        raise ExplainError(f"it holds {', '.join(names)}; choose one with --policy")
    found: dict[str, Any] = chosen[0]
    return found


def _of_outcome(document: dict[str, Any], at: float | None) -> Account:
    decisions = document["decisions"]
    taken = [each for each in decisions if at is None or each["at_seconds"] <= at]
    if not taken:
        first = f"; the first decision is at {decisions[0]['at_seconds']:g} s" if decisions else ", ever"
        raise ExplainError(f"nothing was decided by then{first}")
    decision = taken[-1]
    moment = decision["at_seconds"] if at is None else at
    seen = next((each for each in reversed(document["series"]) if each["at_seconds"] <= moment), None)
    since = f", as decided at {decision['at_seconds']:g} s" if moment != decision["at_seconds"] else ""
    starting = {} if seen is None else seen["starting"]
    missing = {pool: count for pool, count in starting.items() if count}
    return Account(
        title=f"{document['policy']} at {moment:g} s{since}",
        desired=decision["desired"],
        reason=decision["reason"],
        message=decision["message"],
        serving=decision["serving"] if seen is None else seen["serving"],
        starting=starting,
        draining={} if seen is None else seen["draining"],
        queued={} if seen is None else seen["queued"],
        why=decision.get("why"),
        waits_for=", ".join(f"{count} {pool} on their way" for pool, count in missing.items()),
    )
