"""`kllm down`: stop a service, or clean up after a killed one."""

from __future__ import annotations

import os
import signal
import sys
import time

from kllm.finding import Lost, find
from kllm_operator.substrate.exceptions import RunDirectoryError, SubstrateError
from kllm_operator.substrate.identity import ProcessIdentity, kill_all
from kllm_operator.substrate.rundir import RunDirectory, RunState


def run(name: str | None, *, timeout_seconds: float) -> int:
    """Returns 0 when nothing of it is left, 1 when something is, 2 when it is not clear what is meant or is there."""
    try:
        found = find(name)
    except RunDirectoryError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    there = sorted((*found.up, *found.killed, *(each.service for each in found.lost)))
    if len(there) > 1:
        print(f"kllm: there are several services ({', '.join(there)}); name one: kllm down NAME", file=sys.stderr)
        return 2
    if found.lost:
        return _end_lost(found.lost[0], timeout_seconds)
    state = RunDirectory(there[0]).read_state() if there else None
    if state is None:
        print("nothing is up on this machine" if name is None else f"service {name!r} is not up on this machine")
        return 0
    return _end(there[0], state, timeout_seconds)


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


def _end_lost(lost: Lost, timeout_seconds: float) -> int:
    """Stop a service of which only its owner is known: it knows itself what it has started.

    It is not killed, since what it would leave could not be told from other processes.
    """
    pid = lost.holder.pid
    print(f"kllm: {lost.text}", file=sys.stderr)
    if not lost.is_up_command:
        print(f"kllm: pid {pid} is no `kllm up`, so it is left alone", file=sys.stderr)
        return 1
    began = time.monotonic()
    if not _ask(lost.holder, timeout_seconds):
        print(f"kllm: pid {pid} did not stop within {timeout_seconds:g} s; end it with: kill -9 {pid}", file=sys.stderr)
        return 1
    print(f"service {lost.service!r} has stopped ({time.monotonic() - began:.1f} s)")
    return 0


def _ask_owner(state: RunState, timeout_seconds: float) -> bool:
    """Whether its `kllm up` was there and ended by itself."""
    if not state.owner.alive:
        return False
    if _ask(state.owner, timeout_seconds):
        return True
    print(f"kllm: pid {state.pid} did not stop within {timeout_seconds:g} s and is killed", file=sys.stderr)
    kill_all([state.owner])
    return False


def _ask(owner: ProcessIdentity, timeout_seconds: float) -> bool:
    """Send SIGTERM; whether it ended in time."""
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + timeout_seconds
    while owner.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _clean(service: str) -> int:
    directory = RunDirectory(service)
    left = directory.claim()
    directory.release()
    return len(left)
