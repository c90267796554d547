"""A node in front of the API server in memory: it runs the engine of each pod as a process of this machine.

Each pod has a loopback address of its own, so that all of them listen on the ports that pods listen on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kube.fake_api import FakeApi
from substrate.substrate_helpers import FAKE

from kllm_operator.kube.resources import PODS, Document, Resource

_TOKEN_FILE = "/etc/kllm/fleet/token"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class FakeCluster(FakeApi):
    """The API server with one node.

    Attributes:
        unschedulable: pods find no node while this is set; its text is the scheduler's message.
        hangs: pods that get a node while this is set do not run before `go_on`; its text is the kubelet's warning.
        processes: of running pods, by name.
    """

    def __init__(self, *, token_file: Path) -> None:
        super().__init__()
        self.unschedulable = ""
        self.hangs = ""
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._token_file = token_file
        self._addresses = itertools.count(1)
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def create(self, document: Mapping[str, Any]) -> Document:
        made = await super().create(document)
        if made["kind"] != "Pod":
            return made
        made = self.change(made, lambda pod: pod["metadata"].update(creationTimestamp=now()))
        self._tasks[made["metadata"]["uid"]] = asyncio.create_task(self._run(made))
        return made

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """As the API server does it: a pod goes when its node says that it has ended, unless it has no node."""
        if resource != PODS:
            await super().delete(resource, namespace=namespace, name=name, uid=uid)
            return
        await self._call("delete", resource, name)
        live = self.objects.get((resource, namespace, name))
        if live is None or live["metadata"]["uid"] != uid:
            return
        if name not in self.processes:
            self._forget(uid)
            self.remove(live)
            return
        grace = live["spec"]["terminationGracePeriodSeconds"] if grace_seconds is None else grace_seconds
        marks = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
        self.change(live, lambda pod: pod["metadata"].update(marks))
        self._tasks[f"end {uid}"] = asyncio.create_task(self._end(name, uid, grace))

    def remove(self, document: Document) -> None:
        """Also what nobody asked the node for: a deletion by force leaves its process to the node."""
        super().remove(document)
        process = self.processes.pop(document["metadata"]["name"], None)
        if process is not None and process.returncode is None:
            process.kill()

    def go_on(self, name: str) -> None:
        """What a pod waits for is there."""
        self._gates[name].set()

    async def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(process.wait() for process in self.processes.values()))

    async def _run(self, pod: Document) -> None:
        name = pod["metadata"]["name"]
        if self.unschedulable:
            self._status(pod, conditions=[_condition("PodScheduled", "False", self.unschedulable)])
            return
        self.change(pod, lambda each: each["spec"].update(nodeName="node"))
        if self.hangs:
            self.seed(_warning(pod, "FailedMount", self.hangs))
            self._gates[name] = asyncio.Event()
            await self._gates[name].wait()
        address = f"127.1.0.{next(self._addresses)}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, FAKE, "kllm_engine.main", *self._arguments(pod, address),
            "--parent-pid", str(os.getpid()), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes[name] = process
        conditions = [_condition(kind) for kind in ("PodScheduled", "Initialized")]
        state = {"name": "engine", "state": {"running": {"startedAt": now()}}}
        self._status(pod, phase="Running", podIP=address, conditions=conditions, containerStatuses=[state])
        assert process.stdout is not None
        async for line in process.stdout:
            if json.loads(line)["event"] == "serving":
                self._status(pod, conditions=[*conditions, _condition("Ready")])
        await process.wait()
        self._ended(pod, process)

    def _arguments(self, pod: Document, address: str) -> list[str]:
        words = pod["spec"]["containers"][0]["args"]
        values = {"$(POD_NAME)": pod["metadata"]["name"], "$(POD_IP)": address, _TOKEN_FILE: str(self._token_file)}
        return [values.get(word, word).replace("0.0.0.0:", f"{address}:") for word in words]

    def _ended(self, pod: Document, process: asyncio.subprocess.Process) -> None:
        code = int(process.returncode or 0)
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": ""}
        state = {"name": "engine", "state": {"terminated": ended}}
        self._status(pod, phase="Failed" if code else "Succeeded", conditions=[], containerStatuses=[state])

    async def _end(self, name: str, uid: str, grace_seconds: float) -> None:
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_seconds):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await asyncio.wait({self._tasks[uid]})
        live = next((each for each in self.objects.values() if each["metadata"]["uid"] == uid), None)
        if live is not None:
            self.remove(live)

    def _status(self, pod: Document, **status: object) -> None:
        metadata = pod["metadata"]
        live = self.objects.get((PODS, metadata["namespace"], metadata["name"]))
        if live is not None and live["metadata"]["uid"] == metadata["uid"]:
            self.change(live, lambda each: each.setdefault("status", {}).update(status))

    def _forget(self, uid: str) -> None:
        self._tasks[uid].cancel()


def _condition(kind: str, status: str = "True", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "message": message, "lastTransitionTime": now()}


def _warning(pod: Document, reason: str, note: str) -> Document:
    metadata = pod["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "type": "Warning", "reason": reason, "note": note,
        "metadata": {"name": f"{metadata['name']}.1", "namespace": metadata["namespace"]},
        "regarding": {"kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]},
    }  # fmt: skip
