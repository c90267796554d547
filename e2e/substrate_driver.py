"""Drives the substrate of pods on a real API server and kubelet, whose node is this machine.

The pods run stub agents, which come to them as the machine's environment does, and look at files of a folder of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from substrate.drivers import TOKEN, Files
from substrate.polling import polled
from substrate.substrate_helpers import FAKE, processes_with

from e2e.host import IMAGE, HostEnvironment
from kllm_core import labels
from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Role
from kllm_operator.kube.cache import ObjectCache
from kllm_operator.kube.client import ApiServer
from kllm_operator.kube.login import Login
from kllm_operator.kube.resources import PODS, resource_of
from kllm_operator.render.engine import EngineConfig
from kllm_operator.render.owner import Owner
from kllm_operator.substrate.kubernetes import PodSubstrate
from kllm_operator.substrate.kubernetes_states import PodTimeouts
from kllm_operator.substrate.kubernetes_store import PodPlan

_TESTS = Path(FAKE).parents[1]
_EVERY_SECONDS = 0.1


class ClusterPods(Files):
    """Drives pods of one service of its own.

    Attributes:
        cache: what is listed again and again.
        plan: what its pods are made from at first.
    """

    has_slots = True

    def __init__(self, api: ApiServer, folder: Path, name: str, owners: dict[Role, Owner]):
        super().__init__(folder)
        self.api, self.name, self.cache = api, name, ObjectCache(PODS)
        self.following = 0
        self.plan = PodPlan(service_of(name), _config(folder), owners)
        self.substrate = PodSubstrate(self.plan, api=api, pods=self.cache, token=TOKEN, suffix=self._suffix)

    def next_name(self, _role=None):
        """The name that the next start gives."""
        return f"{self.name}-engine-{self.following:05}"

    async def kill(self, name):
        """End a pod's engine by a signal, once it runs."""
        await polled(lambda: self._engine(name))
        os.kill(self._engine(name)[0], signal.SIGKILL)

    def impatient(self):
        """Give up at once what does not serve."""
        self.substrate._timeouts = PodTimeouts(serving=0.05)

    def nothing_of(self, name):
        """Whether neither pod nor process is left."""
        return self.cache.get("default", name) is None and not processes_with("POD_NAME", name)

    async def watch(self):
        """List again and again."""
        while True:
            await self.list()
            await asyncio.sleep(_EVERY_SECONDS)

    async def list(self):
        """Bring the cache up to date."""
        found = await self.api.list(PODS, namespace="default", labels=f"{labels.SERVICE}={self.name}")
        names = {pod["metadata"]["name"] for pod in found}
        gone = [pod for pod in self.cache.all() if pod["metadata"]["name"] not in names]
        for pod in found:
            self.cache.put({"apiVersion": "v1", "kind": "Pod", **pod})
        for pod in gone:
            self.cache.remove(pod)
        self.substrate.notice()

    def _engine(self, name):
        return processes_with("POD_NAME", name)

    def _suffix(self):
        self.following += 1
        return f"{self.following - 1:05}"


@contextlib.asynccontextmanager
async def cluster(kubeconfig: Path, folder: Path) -> AsyncIterator[ClusterPods]:
    """A service of its own, and in the end nothing of it."""
    login = Login(str(kubeconfig))
    await login.load()
    name = f"chat-{secrets.token_hex(3)}"
    async with ApiServer(login) as api:
        made = [await api.create(each) for each in _around(name)]
        owners = {role: _owner(owner) for role, owner in zip(Role, made, strict=False)}
        driver = ClusterPods(api, folder, name, owners)
        watching = asyncio.create_task(driver.watch())
        try:
            yield driver
        finally:
            watching.cancel()
            await driver.substrate.close()
            await driver.list()
            for pod in driver.cache.all():
                await _delete(api, PODS, pod, grace_seconds=1)
            for each in made:
                await _delete(api, resource_of(each), each)


async def _delete(api, resource, document, **rest):
    metadata = document["metadata"]
    await api.delete(resource, namespace="default", name=metadata["name"], uid=metadata["uid"], **rest)


def _around(name):
    """Two owners, which the garbage collector looks for, and what pods mount and are."""

    def made(kind, suffix, **body):
        return {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": f"{name}-{suffix}", "namespace": "default"},
            **body,
        }

    return [
        *(made("ServiceAccount", role.value) for role in Role),
        made("Secret", "fleet-token", stringData={"token": TOKEN}),
        made("ServiceAccount", "engine"),
    ]


def _owner(document):
    return Owner("v1", "ServiceAccount", document["metadata"]["name"], document["metadata"]["uid"])


def service_of(name, uri="demo://smollm2-135m"):
    """A service whose instances need no accelerator."""
    cpu = {"accelerator": {"count": 0}}
    return check_service(
        {
            "apiVersion": "kllm.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "model": {"uri": uri, "name": "smollm2"},
                "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
                "prefill": cpu,
                "decode": cpu,
            },
        }
    )


def _config(folder: Path) -> EngineConfig:
    host = HostEnvironment.of_this_process()
    container = {
        "volumeMounts": [*host.mounts(), {"name": "stub", "mountPath": str(folder), "readOnly": True}],
        "env": [{"name": "PYTHONPATH", "value": str(_TESTS)}, {"name": "STUB_FOLDER", "value": str(folder)}],
    }
    template = {
        "spec": {
            "containers": [{"name": "engine", **container}],
            "initContainers": [{"name": "model", **container}],
            "volumes": [*host.volumes(), {"name": "stub", "hostPath": {"path": str(folder), "type": "Directory"}}],
        }
    }
    command = (str(host.python), FAKE, "kllm_engine.main")
    return EngineConfig(IMAGE, pull_policy="Never", command=command, template=template, drain_seconds=2)
