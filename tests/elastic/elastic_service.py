"""A paced service whose pools move, the loads that move it, and what it said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml

KLLM = (sys.executable, "-m", "kllm.main")
PACE = "prefill=0.05+0.002n,decode=0.03+0.01b"
"""Some 500 prompt tokens per second on prefill, and steps of 40 ms and more on decode: most of each step is spent
waiting, so that two cores keep up with seven engines."""
TUNE = {
    "tick_seconds": 2,
    "stabilisation_seconds": 15,
    "rebalance_seconds": 8,
    "cancel_seconds": 6,
    "window_seconds": 20,
}
"""As the defaults, but for a start of two seconds and phases of a minute."""


@dataclass(frozen=True)
class Load:
    """Requests per second for some seconds, of one size in tokens."""

    rate: float
    seconds: float
    prompt_tokens: int
    output_tokens: int


def send(url: str, load: Load, *, report: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Send a load to its end; the summary of `kllm bench`, which is written to `report`."""
    arguments = [
        "bench", "--url", url, "--rate", load.rate, "--duration", load.seconds, "--isl", load.prompt_tokens,
        "--osl", load.output_tokens, "--ttft-ms", 3000, "--tpot-ms", 100, "--json", report,
    ]  # fmt: skip
    subprocess.run(
        [*KLLM, *map(str, arguments)], env=environment, check=True, capture_output=True, timeout=load.seconds + 90,
    )  # fmt: skip
    summary: dict[str, Any] = json.loads(report.read_text())["summary"]
    return summary


@dataclass
class ElasticService:
    """A running `kllm up --json`; every event it prints is kept."""

    process: subprocess.Popen[str]
    folder: Path
    environment: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Keep events until the end of the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append({"at": time.time(), **json.loads(line)})

    @property
    def url(self) -> str:
        """Base address of the router."""
        return next(event["url"] for event in self.events if event["event"] == "serving")

    def since(self, moment: float, event: str, **wanted: object) -> list[dict[str, Any]]:
        """Events of a kind after a moment."""
        found = [each for each in list(self.events) if each["event"] == event and each["at"] >= moment]
        return [each for each in found if wanted.items() <= each.items()]

    def state(self) -> dict[str, Any]:
        """What the control loop last published."""
        return json.loads((self.folder / "kllm" / "elastic" / "control.json").read_text())

    def counts(self) -> tuple[int, int]:
        """Instances that serve: prefill, decode."""
        pools = self.state()["pools"]
        return pools["prefill"]["ready"], pools["decode"]["ready"]

    def send(self, load: Load) -> dict[str, Any]:
        """Send a load to its end; the summary of `kllm bench`."""
        return send(self.url, load, report=self.folder / "bench.json", environment=self.environment)

    def wait_until(self, condition: Any, *, seconds: float, what: str) -> float:
        """Poll a condition; seconds that it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"not within {seconds} s: {what}; {self.state()['message']}")
            assert self.process.poll() is None, "`kllm up` has ended"
            time.sleep(0.2)
        return time.monotonic() - began


def document(*, most: int = 3, budget: int | None = None) -> dict[str, Any]:
    """One instance of each role, and up to `most`."""
    pool = {"minReplicas": 1, "maxReplicas": most, "engineArgs": {"context-length": 4096}}
    spec = {
        "model": {"uri": "demo://tiny-random-llama", "name": "tiny"},
        "objectives": {"ttftMilliseconds": 3000, "tpotMilliseconds": 100, "percentile": 90},
        "prefill": pool,
        "decode": pool,
        **({} if budget is None else {"gpuBudget": budget}),
    }
    return {
        "apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "elastic"}, "spec": spec,
    }  # fmt: skip


@contextmanager
def elastic(manifest: dict[str, Any]) -> Iterator[ElasticService]:
    """The service, serving, for the length of the context."""
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-elastic-") as name:
        folder = Path(name)
        (folder / "service.yaml").write_text(yaml.safe_dump(manifest))
        environment = os.environ | {"XDG_RUNTIME_DIR": name}
        tuned = [part for setting, value in TUNE.items() for part in ("--tune", f"{setting}={value}")]
        command = [*KLLM, "up", "-f", str(folder / "service.yaml"), "--port", "0", "--json", "--pace", PACE, *tuned]
        with (folder / "up.err").open("w") as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        service = ElasticService(process, folder, environment)
        reader = threading.Thread(target=service.read)
        reader.start()
        try:
            while not service.since(0, "plan"):
                assert process.poll() is None, (folder / "up.err").read_text()
                time.sleep(0.1)
            assert httpx2.get(f"{service.url}/readyz").is_success
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()
                reader.join(10)
                process.stdout.close()
