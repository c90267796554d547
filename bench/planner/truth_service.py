"""A paced service of real engines on this machine, a load that is sent to it, and all that it said meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import yaml

from kllm.bench.client import Client, Target
from kllm.bench.load import Load
from kllm.bench.plan import Planned
from kllm.bench.prompts import Prompts
from kllm.bench.row import Row, Status
from kllm_core.authentication import METADATA_KEY, bearer
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc

KLLM = (sys.executable, "-m", "kllm.main")
_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_DRAIN_SECONDS = 90.0
_ALONE = (64, 512, 1024)
_SHORT_ANSWER = 4
"""Tokens of prompts, in turn, and of answers of requests that are sent one by one."""
_LETTER = 70
"""A token that is a letter in byte-level vocabularies, which begin with special tokens and single bytes."""


class ServiceError(RuntimeError):
    """The service did not come up, or ended by itself; the text has the end of what it said."""


@dataclass
class RealService:
    """A running `kllm up --json`.

    Attributes:
        name: of the service.
        folder: of its manifest and its run directory.
        events: all that it has told, each with the moment (seconds since 1970) at which it came.
    """

    name: str
    process: subprocess.Popen[str]
    folder: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        """Keep events until the end of the process."""
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError):
                self.events.append({"at": time.time(), **json.loads(line)})

    def told(self, event: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [each for each in list(self.events) if each["event"] == event]

    @property
    def url(self) -> str:
        """Of its router."""
        return str(self.told("serving")[0]["url"])

    def check(self) -> None:
        """Raise a `ServiceError` if it has ended."""
        if self.process.poll() is not None:
            errors = (self.folder / "up.err").read_text()
            raise ServiceError(f"`kllm up` has ended with {self.process.returncode}:\n{errors[-2000:]}")

    def pacing(self) -> dict[str, str]:
        """How well each engine keeps its pace, in the words of its agent."""
        run, told = self.folder / "kllm" / self.name, {}
        metadata = [(METADATA_KEY, bearer((run / "token").read_text().strip()))]
        for entry in json.loads((run / "fleet.json").read_text())["instances"]:
            with grpc.insecure_channel(entry["agent"]) as channel:
                stub = engine_pb2_grpc.EngineAgentStub(channel)
                found = stub.GetInstance(engine_pb2.GetInstanceRequest(), metadata=metadata, timeout=10)
            told[found.instance_id] = found.pacing
        return told


@contextmanager
def real_service(manifest: Mapping[str, Any], *, pace: str, tune: Mapping[str, float]) -> Iterator[RealService]:
    """A service for the length of the context; nothing of it is left afterwards.

    Raises:
        ServiceError: it did not come up.
    """
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-truth-") as name:
        folder = Path(name)
        (folder / "service.yaml").write_text(yaml.safe_dump(dict(manifest)))
        environment = os.environ | {"XDG_RUNTIME_DIR": name}
        tuned = [part for setting, value in tune.items() for part in ("--tune", f"{setting}={value:g}")]
        paced = ["--pace", pace] if pace else []
        command = [*KLLM, "up", "-f", str(folder / "service.yaml"), "--port", "0", "--json", *paced, *tuned]
        with (folder / "up.err").open("w") as errors:
            # A session of its own: Ctrl-C reaches it through this process only, which waits for its end.
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        service = RealService(str(manifest["metadata"]["name"]), process, folder)
        listener = threading.Thread(target=service.listen, daemon=True)
        listener.start()
        try:
            _wait_until_planned(service)
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            listener.join(_STOP_SECONDS)


def _wait_until_planned(service: RealService) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not service.told("plan"):
        service.check()
        if time.monotonic() > deadline:
            raise ServiceError(f"it did not serve within {_START_SECONDS:.0f} s")
        time.sleep(0.1)
    httpx2.get(f"{service.url}/readyz", timeout=10).raise_for_status()


@dataclass(frozen=True)
class Sent:
    """What came of a load. Times of rows count from its beginning.

    Attributes:
        began: seconds since 1970.
        rows: of the requests, in their order.
        alone: of requests that were sent one by one before, while nothing else ran; their times are negative.
    """

    began: float
    rows: Sequence[Row]
    alone: Sequence[Row]


async def send(url: str, requests: Sequence[Planned], *, warmups: int, quiet_seconds: float) -> Sent:
    """Send requests in open loop, as `kllm bench` does.

    Args:
        url: of a router of kLLM.
        requests: sorted by time.
        warmups: requests that are sent one by one before: they open connections, and show what handing over takes.
        quiet_seconds: pause after those.

    Raises:
        ServiceError: a request that was sent alone failed.
    """
    async with Client(Target(url, tells_stages=True)) as client:
        await client.find_model()
        prompts = Prompts(await client.calibrate(np.random.default_rng(0)), seed=0)
        alone, clock = [], asyncio.get_running_loop().time
        for number in range(warmups):
            row = Row(len(requests) + number, 0.0, _ALONE[number % len(_ALONE)], _SHORT_ANSWER)
            prompt = prompts.prompt(Planned(row.index, 0.0, row.input_tokens, row.output_tokens))
            await client.ask(_body(client, prompt, row.output_tokens), row, clock)
            if row.status is not Status.OK:
                raise ServiceError(f"a request failed: {row.error}: {row.message}")
            alone.append(row)
        await asyncio.sleep(quiet_seconds)
        load = Load(
            requests,
            prepare=lambda planned: _body(client, prompts.prompt(planned), planned.output_tokens),
            ask=client.ask,
            max_in_flight=1024,
            drain=_DRAIN_SECONDS,
        )
        began, telling = time.time(), asyncio.create_task(_tell(load, len(requests)))
        for row in alone:
            row.scheduled = (row.sent or 0.0) - clock()
        try:
            await load.run(asyncio.Event())
        finally:
            telling.cancel()
    return Sent(began, load.rows, alone)


def _body(client: Client, prompt: str, output_tokens: int) -> bytes:
    """Asks for an answer of one letter, again and again.

    The answer of a random model is full of parts of characters, which are shown when the character is whole: some
    steps after they were computed.
    """
    body = json.loads(client.body(prompt, output_tokens=output_tokens))
    return json.dumps(body | {"logit_bias": {str(_LETTER): 100}}).encode()


async def _tell(load: Load, number: int) -> None:
    while True:
        await asyncio.sleep(10)
        print(f"  {load.elapsed:.0f} s: {len(load.rows)}/{number} sent, {load.in_flight} open", file=sys.stderr)
