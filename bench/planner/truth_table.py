"""Compares what was measured with what was simulated: figures, decisions, and their table. Pure, but for files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import store

STAGES = ("queue", "prefill", "bind", "transfer")
PERCENTILES = (50, 90, 95, 99)
_SMALL_SECONDS = 0.005
"""Below which a difference in percent says nothing."""
Document = dict[str, Any]


def figures(requests: Sequence[Mapping[str, Any]], *, ttft: float, tpot: float) -> Document:
    """What came of some requests.

    Args:
        requests: with `status`, `ttft` and `tpot` in seconds, None where there is none, and `stages`.
        ttft: objective in seconds.
        tpot: the same.

    Returns:
        `ok`, `attainment` (shares of all requests that met both objectives, and each), and percentiles in seconds by
        the name of what was measured.
    """
    answered = [each for each in requests if each["status"] == "ok"]
    meets = [(each["ttft"] <= ttft, (each["tpot"] or 0.0) <= tpot) for each in answered]
    number = max(1, len(requests))
    measured = {name: [each[name] for each in answered] for name in ("ttft", "tpot")}
    measured |= {name: [each["stages"].get(name) for each in answered] for name in STAGES}
    return {
        "ok": len(answered),
        "attainment": {
            "both": sum(one and other for one, other in meets) / number,
            "ttft": sum(one for one, _ in meets) / number,
            "tpot": sum(other for _, other in meets) / number,
        },
        "seconds": {name: _percentiles(values) for name, values in measured.items()},
    }


def handover(alone: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """What handing over takes without any load, in seconds.

    Args:
        alone: prompt tokens and the stages queue and transfer of requests while nothing else ran. Then queue is the way
            to prefill and back, and transfer the way to decode and back and the transfer itself, which is a line over
            the tokens.
    """
    tokens, queues, transfers = (np.array(column) for column in zip(*alone, strict=True))
    hop = float(np.median(queues)) / 2
    moving = transfers - 2 * hop
    per_token = max(0.0, float(np.polyfit(tokens, moving, 1)[0])) if np.ptp(tokens) else 0.0
    base = max(0.0, float(np.median(moving - per_token * tokens)))
    return {"hop_seconds": round(hop, 5), "base_seconds": round(base, 5), "seconds_per_token": round(per_token, 9)}


def beside(real: Document, simulated: Document) -> Document:
    """The figures of both, and by which part of the real ones the simulated ones differ."""
    seconds = {
        name: {
            key: {"real": value, "simulated": other, "off": off(value, other)}
            for key, value in values.items()
            for other in (simulated["seconds"][name].get(key),)
        }
        for name, values in real["seconds"].items()
    }
    attainment = {
        name: {"real": share, "simulated": simulated["attainment"][name]} for name, share in real["attainment"].items()
    }
    return {
        "ok": {"real": real["ok"], "simulated": simulated["ok"]}, "attainment": attainment, "seconds": seconds,
    }  # fmt: skip


def off(real: float | None, simulated: float | None) -> float | None:
    """By which part of the real value the simulated one is above it; None if one is unknown or the real one is 0."""
    return None if not real or simulated is None else simulated / real - 1


def changes(decisions: Iterable[Document]) -> list[Document]:
    """Those that changed a count."""
    kept: list[Document] = []
    for each in decisions:
        if not kept or kept[-1]["desired"] != each["desired"]:
            kept.append(each)
    return kept


def write(path: Path, results: Document) -> None:
    """Write results so that a request is a line; readers find the whole file or none."""
    rows: list[str] = []

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(held) for name, held in value.items()}
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            rows.append("[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]")
            return f"@{len(rows) - 1}@"
        return value

    text = json.dumps(placed(results), indent=1) + "\n"
    for number, lines in enumerate(rows):
        text = text.replace(f'"@{number}@"', lines, 1)
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.replace(path)


def table() -> list[str]:
    """Lines of Markdown: figures and decisions of all runs in `results/truth.json`."""
    path = store.RESULTS / "truth.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    results = {name: result for name, result in found.items() if "figures" in result}
    lines = ["| run | real / simulated | P50 | P90 | P95 | P99 |", "|---|---|---|---|---|---|"]
    lines += [line for name, result in results.items() for line in rows(name, result)]
    told = [line for name, result in results.items() for line in decided(name, result)]
    return [*lines, "", *told] if results else ["Not measured yet."]


def rows(name: str, result: Document) -> list[str]:
    """Of one run."""
    lines = []
    for what, values in result["figures"]["seconds"].items():
        cells = [_cell(values.get(f"p{percentile}")) for percentile in PERCENTILES]
        lines.append(f"| {name} | {_NAMES.get(what, what)} | " + " | ".join(cells) + " |")
    shares = result["figures"]["attainment"]["both"]
    told = f"{100 * shares['real']:.1f} % real, {100 * shares['simulated']:.1f} % simulated"
    return [*lines, f"| {name} | attainment | {told} | | | |"]


def decided(name: str, result: Document) -> list[str]:
    """The decisions of one run that changed counts."""
    return [f"- {name}, {side}: {_decisions(result[side]['decisions'])}" for side in ("real", "simulated")]


_NAMES = {"ttft": "TTFT", "tpot": "TPOT"}


def _cell(values: Mapping[str, Any] | None) -> str:
    if values is None or values["real"] is None or values["simulated"] is None:
        return ""
    is_small = max(values["real"], values["simulated"]) < _SMALL_SECONDS
    told = "" if values["off"] is None or is_small else f" ({100 * values['off']:+.0f} %)"
    return f"{1000 * values['real']:.0f} / {1000 * values['simulated']:.0f} ms{told}"


def _decisions(decisions: Sequence[Document]) -> str:
    return ", ".join(
        f"{each['desired']['prefill']} + {each['desired']['decode']} at {each['at']:.0f} s" for each in decisions
    )


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    found = np.percentile(known, PERCENTILES).tolist() if known else [None] * len(PERCENTILES)
    return {f"p{percentile}": value for percentile, value in zip(PERCENTILES, found, strict=True)}
