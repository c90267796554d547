"""Many services on a real API server without nodes: what the operator costs; `make operator-scale`.

python bench/operator/measure.py [--services 200] [--pods 10] [--rest 60] [--quick] [--json FILE] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cluster_api import MERGE, ClusterApi
from control_plane import ADDRESS, OPERATOR, ControlPlane, control_plane
from nodes import Nodes, is_engine, is_ready
from operator_process import Calls, OperatorProcess, Usage, counted, usage

from kllm.bench.machine import machine_facts

_REPOSITORY = Path(__file__).parents[2]
_INSIDE = "KLLM_BENCH_NETWORK"
_GROUP = "/apis/kllm.io/v1alpha1"
_NAMESPACES = 10
_CHANGED = 5
"""Services of which each kind of change is made, all at the same time."""
_QUIET_SECONDS = 18.0
"""Nothing is written for so long once all is told: words of a status wait for up to 15 s for each other."""
_SHORT_SECONDS = 6.0
_LIMIT_SECONDS = 400.0


class Bench:
    """One run."""

    def __init__(
        self, given: argparse.Namespace, plane: ControlPlane, *, api: ClusterApi, nodes: Nodes, stubs_pid: int
    ) -> None:
        self._given, self._plane, self._api, self._nodes = given, plane, api, nodes
        self._beside = {**plane.pids, "agents and routers": stubs_pid, "nodes and benchmark": os.getpid()}
        self._calls = Calls(plane.audit)
        self._services: dict[str, dict[str, Any]] = {}
        self._config = plane.folder / "operator.json"
        image = {"image": "kllm/bench:1"}
        self._config.write_text(json.dumps({"images": {"engine": image, "router": image}}))
        self._operator = self._begin_operator()

    async def run(self) -> dict[str, Any]:
        """All phases, in order."""
        following = asyncio.create_task(self._follow_services())
        try:
            result = {
                "machine": machine_facts(),
                "services": self._given.services,
                "engine_pods_each": self._given.pods,
                "create": await self._create(),
                "rest": await self._rest(self._given.rest),
                "resync": await self._resync(),
                "restart": await self._restart(),
                "changes": await self._changes(),
            }
            result["load_average_after"] = [round(each, 2) for each in os.getloadavg()]
            return result
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self._operator.stop()

    def _begin_operator(self) -> OperatorProcess:
        return OperatorProcess(self._config, self._plane.kubeconfig(OPERATOR), self._plane.folder / "operator.log")

    async def _create(self) -> dict[str, Any]:
        names = [(f"team-{number % _NAMESPACES}", f"svc-{number:03}") for number in range(self._given.services)]
        for namespace in sorted({namespace for namespace, _ in names}):
            await self._api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        await self._until(lambda: self._operator.metrics().value("leader") == 1)
        before, metrics, wall, began = (
            usage(self._operator.pid),
            self._operator.metrics(),
            time.time(),
            time.monotonic(),
        )
        others = self._usage_beside()
        await asyncio.gather(
            *(
                self._api.ask("POST", f"{_GROUP}/namespaces/{namespace}/inferenceservices", self._service(name))
                for namespace, name in names
            )
        )
        told: dict[str, float] = {"created_seconds": round(time.monotonic() - began, 2)}
        wanted = self._given.services * self._given.pods

        def look() -> bool:
            services = list(self._services.values())
            pods = [pod for pod in list(self._nodes.pods.values()) if is_engine(pod)]
            reached = {
                "all_accepted_seconds": sum(_is(each, "Accepted") for each in services) == len(names),
                "all_pods_made_seconds": len(pods) >= wanted,
                "all_pods_ready_seconds": sum(is_ready(pod) for pod in pods) >= wanted,
                "all_services_ready_seconds": sum(_is(each, "Ready") for each in services) == len(names),
                "all_told_seconds": sum(self._is_complete(each) for each in services) == len(names),
            }
            for name in (name for name, done in reached.items() if done and name not in told):
                told[name] = round(time.monotonic() - began, 2)
            return len(told) == 6

        await self._until(look)
        busy, beside = usage(self._operator.pid).over(before), self._cores_beside(others)
        settled = await self._settle(_QUIET_SECONDS)
        calls = self._calls.since(wall)
        now = self._operator.metrics()
        return {
            **told,
            "settled_seconds": round(settled - began, 2),
            "operator_while_creating": busy,
            "others_cores": beside,
            "reconcile": now.quantiles("reconcile_seconds", metrics),
            "queue_wait": now.quantiles("queue_wait_seconds", metrics),
            "calls_per_service": {
                what: round(count / self._given.services, 2) for what, count in counted(calls).items()
            },
            "writes_per_service": round(sum(call.writes for call in calls) / self._given.services, 2),
            "codes": _codes(calls),
            "pods": len(self._nodes.pods),
        }

    async def _rest(self, seconds: float) -> dict[str, Any]:
        """Nothing changes."""
        before, metrics, wall = usage(self._operator.pid), self._operator.metrics(), time.time()
        others = self._usage_beside()
        await asyncio.sleep(seconds)
        used, beside = usage(self._operator.pid).over(before), self._cores_beside(others)
        now = self._operator.metrics()
        calls = self._calls.since(wall)
        return {
            "operator": used,
            "others_cores": beside,
            "writes": sum(call.writes for call in calls),
            "written": counted([call for call in calls if call.writes]),
            "reads": counted([call for call in calls if not call.writes]),
            "reconcile": now.quantiles("reconcile_seconds", metrics),
            "scrape": {"bytes": now.bytes, "seconds": round(now.seconds, 3)},
        }

    async def _changes(self) -> dict[str, Any]:
        """One change of each kind to some services, all at once; which calls each led to."""
        kinds: dict[str, Callable[[str], Awaitable[None]]] = {
            "larger bounds": self._raise_bounds,
            "one more instance": self._one_more,
            "a pod that fails": self._fail,
            "a pod that is deleted": self._delete,
        }
        if not self._given.quick:
            kinds["another pod template"] = self._roll_out
        each = min(_CHANGED, self._given.services // len(kinds))
        groups = {
            kind: [f"svc-{number * each + index:03}" for index in range(each)] for number, kind in enumerate(kinds)
        }
        metrics, wall = self._operator.metrics(), time.time()
        await asyncio.gather(*(kinds[kind](name) for kind, names in groups.items() for name in names))
        await self._settle(self._quiet)
        calls, now = self._calls.since(wall), self._operator.metrics()
        told = {}
        for kind, names in groups.items():
            by_service = [[call for call in calls if call.object.partition("/")[2].startswith(name)] for name in names]
            writes = [sum(call.writes for call in some) for some in by_service]
            told[kind] = {
                "writes_median": statistics.median(writes),
                "writes_most": max(writes),
                "calls": counted([call for some in by_service for call in some]),
                "of_services": each,
            }
        others = [call for call in calls if not any(name in call.object for names in groups.values() for name in names)]
        return {
            **told,
            "elsewhere": counted(others),
            "writes_elsewhere": sum(call.writes for call in others),
            "reconcile": now.quantiles("reconcile_seconds", metrics),
            "queue_wait": now.quantiles("queue_wait_seconds", metrics),
        }

    async def _resync(self) -> dict[str, Any]:
        """Have all services looked at again, by an annotation that means nothing."""
        before, metrics, wall, began = (
            usage(self._operator.pid),
            self._operator.metrics(),
            time.time(),
            time.monotonic(),
        )
        reconciles = metrics.value("reconciles_total")
        await asyncio.gather(
            *(
                self._patch(each["metadata"]["name"], {"metadata": {"annotations": {"bench.kllm.io/at": str(wall)}}})
                for each in list(self._services.values())
            )
        )
        await self._until(
            lambda: self._operator.metrics().value("reconciles_total") - reconciles >= self._given.services
        )
        seconds = round(time.monotonic() - began, 2)
        await self._settle(self._quiet)
        calls, now = self._calls.since(wall), self._operator.metrics()
        return {
            "seconds": seconds,
            "operator": usage(self._operator.pid).over(before),
            "reconcile": now.quantiles("reconcile_seconds", metrics),
            "queue_wait": now.quantiles("queue_wait_seconds", metrics),
            "writes": sum(call.writes for call in calls),
            "written": counted([call for call in calls if call.writes]),
        }

    async def _restart(self) -> dict[str, Any]:
        """Another process takes over all that is there."""
        stopped, wall = self._operator.stop(), time.time()
        self._operator = self._begin_operator()
        began = self._operator.began
        await self._until(lambda: self._operator.metrics().value("leader") == 1)
        leads = time.monotonic() - began
        await self._until(lambda: self._operator.metrics().value("reconciles_total") >= self._given.services)
        seconds = time.monotonic() - began
        begun = usage(self._operator.pid)
        await self._settle(self._quiet)
        used = usage(self._operator.pid).over(begun)
        calls, now = self._calls.since(wall), self._operator.metrics()
        empty = type(now)("")
        return {
            "stop_seconds": round(stopped, 2),
            "leads_seconds": round(leads, 2),
            "all_looked_at_seconds": round(seconds, 2),
            "operator": used,
            "reconcile": now.quantiles("reconcile_seconds", empty),
            "reads": counted([call for call in calls if not call.writes]),
            "writes": sum(call.writes for call in calls),
            "written": counted([call for call in calls if call.writes]),
        }

    def _usage_beside(self) -> dict[str, Usage]:
        return {name: usage(pid) for name, pid in self._beside.items()}

    def _cores_beside(self, before: dict[str, Usage]) -> dict[str, float]:
        return {name: now.over(before[name])["cores"] for name, now in self._usage_beside().items()}

    @property
    def _quiet(self) -> float:
        return _SHORT_SECONDS if self._given.quick else _QUIET_SECONDS

    async def _settle(self, seconds: float) -> float:
        """Wait until the operator has written nothing for some time; when it last did, on the monotonic clock."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        since = time.time()
        while True:
            last = max((call.at for call in self._calls.since(since) if call.writes), default=since)
            if (quiet := time.time() - last) >= seconds:
                return time.monotonic() - quiet
            if time.monotonic() > deadline:
                recent = counted([call for call in self._calls.since(time.time() - seconds) if call.writes])
                print(f"does not come to rest: {recent}", file=sys.stderr)
                return time.monotonic()
            await asyncio.sleep(0.5)

    async def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not reached():
            _ = self._operator.pid
            if time.monotonic() > deadline:
                raise RuntimeError(f"not reached in {_LIMIT_SECONDS:.0f} s; logs are in {self._plane.folder}")
            await asyncio.sleep(0.5)

    async def _follow_services(self) -> None:
        async for _, service in self._api.watch(f"{_GROUP}/inferenceservices"):
            self._services[service["metadata"]["uid"]] = service

    def _service(self, name: str) -> dict[str, Any]:
        least = self._given.pods // 2
        role = {"minReplicas": least, "maxReplicas": least + 2}
        return {
            "apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": name},
            "spec": {
                "model": {"uri": "demo://smollm2-135m", "name": "smollm2"},
                "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150}, "prefill": role, "decode": role,
            },
        }  # fmt: skip

    def _is_complete(self, service: dict[str, Any]) -> bool:
        status = service.get("status") or {}
        return all((status.get(role) or {}).get("ready") == self._given.pods // 2 for role in ("prefill", "decode"))

    async def _patch(self, name: str, body: dict[str, Any]) -> None:
        namespace = f"team-{int(name.removeprefix('svc-')) % _NAMESPACES}"
        await self._api.ask("PATCH", f"{_GROUP}/namespaces/{namespace}/inferenceservices/{name}", body, kind=MERGE)

    async def _raise_bounds(self, name: str) -> None:
        await self._patch(name, {"spec": {"prefill": {"maxReplicas": self._given.pods // 2 + 3}}})

    async def _one_more(self, name: str) -> None:
        await self._patch(name, {"spec": {"prefill": {"minReplicas": self._given.pods // 2 + 1}}})

    async def _fail(self, name: str) -> None:
        await self._nodes.fail(self._nodes.engines(name)[0])

    async def _delete(self, name: str) -> None:
        metadata = self._nodes.engines(name)[0]["metadata"]
        await self._api.ask("DELETE", f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}")

    async def _roll_out(self, name: str) -> None:
        template = {"metadata": {"annotations": {"bench.kllm.io/template": "2"}}}
        await self._patch(name, {"spec": {"decode": {"template": template}}})


def _is(service: dict[str, Any], condition: str) -> bool:
    held = (service.get("status") or {}).get("conditions") or ()
    return any(each["type"] == condition and each["status"] == "True" for each in held)


def _codes(calls: list[Any]) -> dict[str, int]:
    """Answers that are no success."""
    found: dict[str, int] = {}
    for call in calls:
        if call.code >= 400:
            key = f"{call.code} {call.what}"
            found[key] = found.get(key, 0) + 1
    return found


async def measure(given: argparse.Namespace, plane: ControlPlane, stubs_pid: int) -> dict[str, Any]:
    """Run on a control plane that has the kinds, beside the process of all agents and routers."""
    async with ClusterApi(plane) as api:
        nodes = Nodes(api)
        playing = asyncio.create_task(nodes.run())
        bench = Bench(given, plane, api=api, nodes=nodes, stubs_pid=stubs_pid)
        running = asyncio.create_task(bench.run())
        try:
            await asyncio.wait({playing, running}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            return running.result()
        finally:
            for task in (running, playing):
                task.cancel()
            await asyncio.gather(running, playing, return_exceptions=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--services", type=int, default=200, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--pods", type=int, default=10, metavar="N", help="engine pods of each (default: %(default)s)")
    parser.add_argument("--rest", type=float, default=60.0, metavar="S", help="seconds of rest (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="wait less, and roll out nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the result; left out: the standard output")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep all logs in this new folder")
    return parser


def main() -> None:
    """Measure in a network namespace of its own, in which ports and addresses are nobody else's."""
    given = _parser().parse_args()
    if _INSIDE not in os.environ:
        links = f'ip link set lo up && ip address add {ADDRESS}/32 dev lo && exec "$@"'
        command = ["unshare", "--net", "--", "sh", "-c", links, "sh", sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    folder = given.logs or Path(tempfile.mkdtemp(prefix="kllm-operator-"))
    with ExitStack() as stack:
        if given.logs is None:
            stack.callback(shutil.rmtree, folder)
        plane = stack.enter_context(control_plane(folder))
        crds = ["-m", "kllm_operator.crds", "--kubeconfig", str(plane.kubeconfig(OPERATOR)), "apply", "crds"]
        subprocess.run([sys.executable, *crds], check=True, cwd=_REPOSITORY, timeout=_LIMIT_SECONDS)
        with (folder / "stubs.log").open("wb") as log:
            stubs = subprocess.Popen([sys.executable, Path(__file__).with_name("stubs.py")], stdout=log, stderr=log)
        stack.callback(stubs.wait)
        stack.callback(stubs.terminate)
        result = asyncio.run(measure(given, plane, stubs.pid))
    text = json.dumps(result, indent=2) + "\n"
    if given.json is None:
        sys.stdout.write(text)
    else:
        given.json.write_text(text)


if __name__ == "__main__":
    main()
