"""`kllm down`: stop a service, or clean up after a killed one."""

from __future__ import annotations

import os
import signal
import sys
import time

from kllm_operator.substrate.exceptions import SubstrateError
from kllm_operator.substrate.identity import kill_all
from kllm_operator.substrate.rundir import RunDirectory, RunState, service_names


def run(name: str | None, *, timeout_seconds: float) -> int:
    """Returns 0 when nothing of it is left, 1 when something is, 2 when it is not clear what is meant."""
    known = {service: RunDirectory(service).read_state() for service in service_names()}
    there = {service: state for service, state in known.items() if state is not None}
    if name is None and len(there) > 1:
        print(f"kllm: there are several services ({', '.join(there)}); name one: kllm down NAME", file=sys.stderr)
        return 2
    if name is None and not there:
        print("nothing is up on this machine")
        return 0
    service = name or next(iter(there))
    state = there.get(service)
    if state is None:
        print(f"service {service!r} is not up on this machine")
        return 0
    return _end(service, state, timeout_seconds)


def _end(service: str, state: RunState, timeout_seconds: float) -> int:
    began = time.monotonic()
    orderly = _ask_owner(state, timeout_seconds)
    try:
        left = _clean(service)
    except SubstrateError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 1
    seconds = f"{time.monotonic() - began:.1f} s"
    if orderly and not left:
        print(f"service {service!r} has stopped ({seconds})")
    else:
        print(f"service {service!r} was cleaned up: {left} processes were left and are ended ({seconds})")
    return 0


def _ask_owner(state: RunState, timeout_seconds: float) -> bool:
    """Whether its `kllm up` was there and ended by itself."""
    if not state.owner.alive:
        return False
    try:
        os.kill(state.pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + timeout_seconds
    while state.owner.alive:
        if time.monotonic() > deadline:
            print(f"kllm: pid {state.pid} did not stop within {timeout_seconds:g} s and is killed", file=sys.stderr)
            kill_all([state.owner])
            return False
        time.sleep(0.02)
    return True


def _clean(service: str) -> int:
    directory = RunDirectory(service)
    left = directory.claim()
    directory.release()
    return len(left)
