"""Simulated against real: one short trace on paced engines of this machine, and in the simulator.

    python bench/planner/truth.py                 both runs, twelve minutes
    python bench/planner/truth.py --only static   fixed counts
    python bench/planner/truth.py --again         simulate anew what is in results/truth.json

Real SGLang engines compute a tiny model, and their steps are made to last as long as the pace says (`kllm up --pace`).
The simulator gets the same pace as its timing, the same requests at the same times after the first tick of the loop,
the same manifest and settings, the start times that were measured, and what a message to an engine and a handover of
KV take, as requests showed that were sent one by one before. Ctrl-C leaves nothing running.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import loads
import psutil
import store
import truth_table
from truth_service import RealService, Sent, ServiceError, real_service, send
from truth_simulated import handover, imitate, measured

from kllm.bench.machine import machine_facts
from kllm.bench.plan import Planned
from kllm.sim.engines import document
from kllm.sim.offered import Part, of_trace
from kllm_core.engine_model.spec import EngineSpec
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming

RESULTS = store.RESULTS / "truth.json"
TRACE = "azure-conv"
PREFILL = PrefillTiming(a=0.05, b=0.001, k=1e-8)
DECODE = DecodeTiming(a=0.05, b=0.003, c=1e-6)
"""About 1,000 prompt tokens per second, and decode steps of 60 to 100 ms: far more than the engines compute for."""
PACE = f"prefill={PREFILL.a:g}+{PREFILL.b:g}n+{PREFILL.k:g}q,decode={DECODE.a:g}+{DECODE.b:g}b+{DECODE.c:g}c"
ENGINE = EngineSpec(EngineTiming(PREFILL, DECODE), kv_tokens=65_536, chunk_tokens=2048, max_running=48)
_LONGEST = 2048, 320
"""Tokens of prompts and answers; longer requests of the trace are left out, since one would take most of a minute."""
_OBJECTIVES = {"ttftMilliseconds": 2500, "tpotMilliseconds": 100, "percentile": 90}
_WARMUPS = 16
_FIRST = 4
"""Of those, the ones that are not looked at: they open connections."""
_NO_REQUEST_SECONDS = 20.0
Document = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        least: instances of each role.
        most: instances of each role.
        phases: seconds of the trace, and the part of its requests that is sent, one after another.
        tune: settings of the loop.
    """

    least: tuple[int, int]
    most: tuple[int, int]
    phases: tuple[tuple[float, float], ...]
    tune: Mapping[str, float]

    def requests(self, folder: Path) -> tuple[Planned, ...]:
        """What is sent, from 0 on."""
        taken: list[Planned] = []
        begin = 0.0
        for seconds, share in self.phases:
            part = Part(begin, begin + seconds, scale=share)
            offered = of_trace(folder / loads.FILES[TRACE], part, inputs=None, outputs=None, seed=1)
            taken += [replace(each, at=each.at + begin) for each in offered.requests if _is_short(each)]
            begin += seconds
        return tuple(replace(each, index=index) for index, each in enumerate(taken))

    def manifest(self) -> Document:
        """Of the service."""
        arguments = {
            "context-length": 4096, "max-total-tokens": ENGINE.kv_tokens, "max-running-requests": ENGINE.max_running,
            "chunked-prefill-size": ENGINE.chunk_tokens,
        }  # fmt: skip
        pools = {
            role: {"minReplicas": self.least[place], "maxReplicas": self.most[place], "engineArgs": arguments}
            for place, role in enumerate(("prefill", "decode"))
        }
        spec = {
            "model": {"uri": "demo://tiny-random-llama", "name": "tiny"},
            "objectives": _OBJECTIVES,
            **pools,
        }
        return {
            "apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "truth"}, "spec": spec,
        }  # fmt: skip


CASES: Mapping[str, Case] = {
    "static": Case((1, 1), (1, 1), ((300.0, 0.35),), {}),
    "elastic": Case(
        (1, 1),
        (2, 2),
        ((40.0, 0.25), (120.0, 0.8), (140.0, 0.1)),
        {"tick_seconds": 2, "stabilisation_seconds": 20, "rebalance_seconds": 10, "cancel_seconds": 6},
    ),
}


def measure(case: Case, folder: Path, note: str) -> Document:
    """The real run.

    Args:
        case: what is run.
        folder: of the traces.
        note: conditions worth knowing.
    """
    requests = case.requests(folder)
    print(f"real: {len(requests)} requests in {requests[-1].at:.0f} s", file=sys.stderr)
    with real_service(case.manifest(), pace=PACE, tune=case.tune) as service:
        psutil.cpu_percent()
        sent = asyncio.run(send(service.url, requests, warmups=_WARMUPS, quiet_seconds=_NO_REQUEST_SECONDS))
        busy = psutil.cpu_percent() / 100
        service.check()
        pacing = service.pacing()
    return {
        "note": note,
        "pace": PACE,
        "machine": machine_facts(),
        "sglang": importlib.metadata.version("sglang"),
        "processors_busy": round(busy, 3),
        "pacing": pacing,
        "lead_seconds": round(sent.began - service.told("plan")[0]["at"], 3),
        "handover": handover(sent.alone[_FIRST:]),
        "start_seconds": _mean(service, "Start"),
        "switch_seconds": _mean(service, "Flip"),
        "decisions": _decisions(service, sent),
        "before": [measured(row) for row in sent.alone],
        "requests": [measured(row) for row in sent.rows],
    }


def result(case: Case, real: Document) -> Document:
    """What was measured beside what is simulated."""
    simulated = simulate(case, real)
    ttft, tpot = (_OBJECTIVES[f"{each}Milliseconds"] / 1000 for each in ("ttft", "tpot"))
    figures = [truth_table.figures(each["requests"], ttft=ttft, tpot=tpot) for each in (real, simulated)]
    return {
        "objectives": _OBJECTIVES, "phases": case.phases, "tune": dict(case.tune),
        "figures": truth_table.beside(*figures), "real": real, "simulated": simulated,
    }  # fmt: skip


def simulate(case: Case, real: Document) -> Document:
    """The same in the simulator."""
    counts = ",".join(map(str, case.least))
    is_static = case.least == case.most
    with tempfile.TemporaryDirectory() as name:
        engine = Path(name) / "engine.json"
        engine.write_text(json.dumps(document(ENGINE)))
        return imitate(
            real, manifest=case.manifest(), engine=engine, policy=f"static:{counts}" if is_static else "slo",
            initial=counts, knobs=() if is_static else [f"{name}={value}" for name, value in case.tune.items()],
        )  # fmt: skip


def _is_short(request: Planned) -> bool:
    return request.input_tokens <= _LONGEST[0] and request.output_tokens <= _LONGEST[1]


def _decisions(service: RealService, sent: Sent) -> list[Document]:
    told = [
        {"at": round(each["at"] - sent.began, 1), "desired": each["desired"], "reason": each["reason"]}
        for each in service.told("plan")
    ]
    return truth_table.changes(told)


def _mean(service: RealService, how: str) -> float | None:
    """From decisions to serving."""
    seconds = [each["decision_to_serving_seconds"] for each in service.told("capacity") if each["how"] == how]
    return round(statistics.fmean(seconds), 3) if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), help="one of the runs")
    parser.add_argument("--again", action="store_true", help="keep what was measured, and simulate it anew")
    parser.add_argument("--traces", type=Path, default=loads.TRACES, help="folder of the traces")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--note", default="", help="conditions worth knowing")
    given = parser.parse_args()
    loads.check_traces(given.traces)
    results: Document = json.loads(given.out.read_text()) if given.out.is_file() else {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in CASES if given.only is None else (given.only,):
            if given.again and name not in results:
                continue
            print(name, file=sys.stderr)
            if not given.again:
                results[name] = {"real": measure(CASES[name], given.traces, given.note)}
                truth_table.write(given.out, results)
            results[name] = result(CASES[name], results[name]["real"])
            truth_table.write(given.out, results)
            print("\n".join(truth_table.rows(name, results[name])), file=sys.stderr)
    except ServiceError as error:
        raise SystemExit(f"truth: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; what was finished is kept") from None


if __name__ == "__main__":
    main()
