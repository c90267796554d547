"""The operator as a process: what it uses, what it counts, and what the API server saw of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

_PORT = 8080
_END_SECONDS = 30.0
_READS = frozenset({"get", "list", "watch"})


@dataclass(frozen=True)
class Call:
    """One request of the operator, as the API server noted it.

    Attributes:
        at: seconds since the epoch.
        what: verb and resource; a server-side apply is `apply`.
        object: namespace/name.
        code: of HTTP.
        is_lease: it keeps the leader's lease.
    """

    at: float
    what: str
    object: str
    code: int
    is_lease: bool

    @property
    def writes(self) -> bool:
        """Whether it changes something but the lease."""
        return self.what.split()[0] not in _READS and not self.is_lease


class Calls:
    """All requests of the operator, from the API server's audit log.

    Args:
        log: file, which grows.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, 0
        self._calls: list[Call] = []

    def since(self, at: float) -> list[Call]:
        """Those that began at this time or later, without watches, which end when they end."""
        if self._log.exists():
            with self._log.open() as lines:
                lines.seek(self._read)
                for line in iter(lines.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self._calls.append(_call(json.loads(line)))
                    self._read = lines.tell()
        return [call for call in self._calls if call.at >= at and not call.what.startswith("watch")]


def _call(entry: dict) -> Call:
    about = entry.get("objectRef") or {}
    verb = "apply" if "force=true" in entry["requestURI"] else entry["verb"]
    resource = "/".join(part for part in (about.get("resource"), about.get("subresource")) if part)
    at = datetime.fromisoformat(entry["requestReceivedTimestamp"]).timestamp()
    name = f"{about.get('namespace', '')}/{about.get('name', '')}"
    code = int((entry.get("responseStatus") or {}).get("code", 0))
    return Call(at, f"{verb} {resource}", name, code, about.get("resource") == "leases")


def counted(calls: list[Call]) -> dict[str, int]:
    """How many of each kind, the most frequent first; the lease's are left out."""
    return dict(Counter(call.what for call in calls if not call.is_lease).most_common())


@dataclass(frozen=True)
class Usage:
    """What a process has used at one moment."""

    at: float
    cpu_seconds: float
    rss_bytes: int
    descriptors: int
    threads: int

    def over(self, before: Usage) -> dict[str, float]:
        """What it used since."""
        seconds = self.at - before.at
        return {
            "seconds": round(seconds, 1),
            "cores": round((self.cpu_seconds - before.cpu_seconds) / seconds, 4),
            "rss_mib": round(self.rss_bytes / 2**20, 1),
            "descriptors": self.descriptors,
            "threads": self.threads,
        }


def usage(pid: int) -> Usage:
    """Of a process that runs."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return Usage(
        time.monotonic(), times.user + times.system, process.memory_info().rss, process.num_fds(), process.num_threads()
    )


class OperatorProcess:
    """`python -m kllm_operator.main` until `stop`.

    Args:
        config: its settings.
        kubeconfig: way to the API server.
        log: file that its log is appended to.
    """

    def __init__(self, config: Path, kubeconfig: Path, log: Path) -> None:
        self.began = time.monotonic()
        arguments = ["--config", config, "--kubeconfig", kubeconfig, "--listen", f"127.0.0.1:{_PORT}"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kllm_operator.main", *arguments], stdout=output, stderr=output
            )

    @property
    def pid(self) -> int:
        """Of its process, which runs.

        Raises:
            RuntimeError: it has ended.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator has ended with {self._process.returncode}")
        return self._process.pid

    def stop(self) -> float:
        """Have it end; seconds that this took."""
        began = time.monotonic()
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        return time.monotonic() - began

    def metrics(self) -> Metrics:
        """What it counts; nothing as long as it does not listen."""
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics", timeout=10) as answer:
                text = answer.read()
        except OSError:
            return Metrics("")
        return Metrics(text.decode(), seconds=time.monotonic() - began)


class Metrics:
    """One scrape, and how long it took in seconds."""

    def __init__(self, text: str, *, seconds: float = 0.0) -> None:
        self.bytes, self.seconds = len(text), seconds
        self._samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def value(self, name: str) -> float:
        """The sum over all labels."""
        return sum(each.value for each in self._samples if each.name == f"kllm_operator_{name}")

    def quantiles(self, name: str, before: Metrics) -> dict[str, float]:
        """Count, median, p99 and upper bound of the largest, in milliseconds, of a histogram since another scrape."""
        counts = [(bound, count - dict(before._buckets(name)).get(bound, 0.0)) for bound, count in self._buckets(name)]
        total = counts[-1][1] if counts else 0.0
        if not total:
            return {"count": 0}
        most = next(bound for bound, count in counts if count == total)
        return {
            "count": int(total),
            "p50_milliseconds": _quantile(counts, 0.5 * total),
            "p99_milliseconds": _quantile(counts, 0.99 * total),
            "most_milliseconds_below": 1000 * most,
        }

    def _buckets(self, name: str) -> Iterator[tuple[float, float]]:
        for each in self._samples:
            if each.name == f"kllm_operator_{name}_bucket":
                yield float(each.labels["le"]), each.value


def _quantile(counts: list[tuple[float, float]], rank: float) -> float:
    """Within a bucket, evenly spread; in milliseconds."""
    below, passed = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            inside = (rank - passed) / (count - passed)
            return round(1000 * (below + inside * (bound - below)), 2)
        below, passed = bound, count
    raise AssertionError("the last bucket has all")
