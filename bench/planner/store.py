"""Runs in parallel whose results stay: a line of JSON each, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cases
import loads

RESULTS = Path(__file__).parent / "results"


def options(description: str) -> argparse.ArgumentParser:
    """What all scripts of this folder take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--traces", type=Path, default=loads.TRACES, help="folder of the traces")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--again", action="append", default=[], metavar="POLICY", help="forget results of a policy")
    parser.add_argument("--quick", action="store_true", help="a few runs of everything, to see that it works")
    return parser


class Store:
    """Results of one script by the descriptions of their runs.

    Args:
        name: of the file in `results`.
        given: the script's options.
    """

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self._path = RESULTS / f"{name}{'-quick' if given.quick else ''}.jsonl"
        self._jobs, self._folder = max(1, given.jobs), given.traces.resolve()
        self._rows: dict[str, dict[str, Any]] = {}
        if self._path.is_file():
            lines = [json.loads(line) for line in self._path.read_text().splitlines()]
            self._rows = {key(row["run"]): row for row in lines if row["run"]["policy"] not in given.again}
            self._write()

    def get(self, specs: Iterable[cases.Spec]) -> list[dict[str, Any]]:
        """Figures of each, run now where there are none yet.

        The first SIGINT or SIGTERM ends this process; what has been finished by then is kept.
        """
        wanted = list(specs)
        missing = list({key(spec): spec for spec in wanted if key(spec) not in self._rows}.values())
        if missing:
            self._run(missing)
        return [self._rows[key(spec)]["figures"] for spec in wanted]

    def _run(self, specs: Sequence[cases.Spec]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(self._jobs, context, initializer=_begin)
        # No more is submitted than runs at a time, so that an end need not wait for what has not begun.
        waiting, running = deque(specs), dict[Future[dict[str, Any]], cases.Spec]()
        began, done = time.monotonic(), 0
        try:
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    spec = waiting.popleft()
                    running[pool.submit(cases.run, spec, self._folder)] = spec
                for future in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                    row = {"run": running.pop(future), "figures": future.result()}
                    self._keep(row)
                    done += 1
                    left = (time.monotonic() - began) / done * (len(specs) - done)
                    print(f"{done}/{len(specs)}, {left / 60:.0f} min left: {_told(row)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            raise SystemExit(f"stopped; {self._path} keeps what was done, the same command goes on") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, row: dict[str, Any]) -> None:
        self._rows[key(row["run"])] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def tidy(self) -> None:
        """Write the file in one order, whatever order the runs ended in."""
        self._rows = dict(sorted(self._rows.items()))
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in self._rows.values()))
        beside.replace(self._path)


def key(spec: cases.Spec) -> str:
    """A description as text; equal ones have equal texts."""
    return json.dumps(spec, sort_keys=True)


def read(name: str) -> list[dict[str, Any]]:
    """Rows of a script's file, `run` and `figures`; none without the file."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _begin() -> None:
    # A terminal sends Ctrl-C to all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _told(row: dict[str, Any]) -> str:
    run, figures = row["run"], row["figures"]
    shown = {name: value for name, value in run.items() if value not in ({}, None)}
    return f"{shown} {figures['attainment']['both']:.4f} at {figures['gpu_seconds'] / 3600:.2f} GPU hours"
