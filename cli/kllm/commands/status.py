"""`kllm status`: what is up on this machine."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from kllm.finding import Found, find
from kllm.rows import Row, look
from kllm.tables import print_tables
from kllm_operator.substrate.exceptions import RunDirectoryError

_CLEAR = "\x1b[2J\x1b[H"


def watch(name: str | None, *, seconds: float) -> int:
    """Show it again and again until Ctrl-C, or until nothing is up; returns what `run` last returned."""
    status = 0
    try:
        while True:
            if sys.stdout.isatty():
                print(_CLEAR, end="")
            status = run(name, as_json=False)
            sys.stdout.flush()
            if status == 2:
                break
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()
    return status


def run(name: str | None, *, as_json: bool) -> int:
    """Returns 0 with everything to show, 1 when something is up that cannot be looked into, 2 when nothing is.

    Args:
        name: of the service; None shows all.
        as_json: for programs.
    """
    try:
        found = find(name)
    except RunDirectoryError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    is_sound = True
    for service in found.up:
        seen = look(service)
        rows += seen.rows
        is_sound = is_sound and seen.is_sound
        for problem in seen.problems:
            print(f"kllm: {problem}", file=sys.stderr)
    if as_json and (rows or name is None):
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        print_tables(rows)
    _tell_others(found, name)
    if found.lost or not is_sound:
        return 1
    return 0 if found.up else 2


def _tell_others(found: Found, name: str | None) -> None:
    for lost in found.lost:
        print(f"kllm: {lost.text}", file=sys.stderr)
    if found.up or found.lost:
        return
    for service in found.killed:
        print(f"kllm: `kllm up` of {service!r} was killed; clean up with: kllm down {service}", file=sys.stderr)
    if not found.killed:
        print(f"kllm: {found.nothing(name)}", file=sys.stderr)
