"""The operator's calls on a real API server: the contract of the one in memory, and what only a real one can show."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import pytest
from kube import api_contract
from substrate.polling import polled

from e2e.cluster.cluster import Cluster
from e2e.cluster.components import API
from e2e.kube import Kube
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.client import ApiServer
from kllm_operator.kube.exceptions import InvalidError
from kllm_operator.kube.informer import Informer
from kllm_operator.kube.login import Login
from kllm_operator.kube.resources import LEASES, SERVICES

globals().update({name: test for name, test in vars(api_contract).items() if name.startswith("test_")})

_SOON_SECONDS = 20.0


@pytest.fixture
async def login(cluster: Kube) -> Login:
    """The way to the cluster."""
    found = Login(str(cluster.target.kubeconfig))
    await found.load()
    return found


@pytest.fixture
async def api(login: Login) -> AsyncIterator[ApiServer]:
    """Calls to it."""
    async with ApiServer(login) as made:
        yield made


async def test_a_field_that_the_kind_does_not_have_is_refused(api: ApiServer, namespace: str) -> None:
    wrong = api_contract.service(namespace)
    wrong["spec"]["bogus"] = 1
    for write in (api.apply, api.create):
        with pytest.raises(InvalidError, match="bogus"):
            await write(wrong)


async def test_a_list_of_many_pages_is_whole(api: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kllm_operator.kube.client._PAGE", 3)
    names = [f"lease-{number:02}" for number in range(10)]
    for name in names:
        await api.create(_lease(namespace, name))
    assert [each["metadata"]["name"] for each in await api.list(LEASES, namespace=namespace)] == names


def _lease(namespace: str, name: str) -> dict[str, Any]:
    return {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": {"name": name, "namespace": namespace}}


class Watched:
    """A cache of Services that an informer keeps, in a thread: kopf ends all tasks of its event loop when it ends."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self._kubeconfig, self._namespace = kubeconfig, namespace
        self._caches = Caches([SERVICES])
        self._filled, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        """Watch, from what there is on."""
        self._thread.start()
        assert self._filled.wait(_SOON_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        """Watch no more."""
        self._stop.set()
        self._thread.join()

    async def until(self, names: set[str]) -> None:
        """Wait until exactly these are known."""
        async with asyncio.timeout(_SOON_SECONDS):
            await polled(lambda: {each["metadata"]["name"] for each in self._caches.of(SERVICES).all()} == names)

    async def _run(self) -> None:
        login = Login(self._kubeconfig)
        await login.load()
        async with ApiServer(login) as api:
            informer = Informer(
                login, api, self._caches, namespaces=[self._namespace], changed=lambda *_: None,
                corrected=lambda *_: None,
            )  # fmt: skip
            await informer.fill()
            self._filled.set()
            stop = asyncio.Event()
            stopping = asyncio.create_task(polled(self._stop.is_set))
            stopping.add_done_callback(lambda _: stop.set())
            await informer.watch(stop, asyncio.Event())


@pytest.fixture
def watched(cluster: Kube, namespace: str) -> Iterator[Watched]:
    """An informer that watches."""
    with Watched(str(cluster.target.kubeconfig), namespace) as made:
        yield made


async def test_a_cache_follows_what_is_ours_and_leaves_the_rest_out(
    api: ApiServer, namespace: str, watched: Watched
) -> None:
    made = await api.apply(api_contract.service(namespace, "ours"))
    await api.apply(api_contract.service(namespace, "theirs", labels={"a": "b"}))
    await watched.until({"ours"})
    await api.apply(api_contract.service(namespace, "second"))
    await watched.until({"ours", "second"})
    await api.delete(SERVICES, namespace=namespace, name="ours", uid=made["metadata"]["uid"])
    await watched.until({"second"})


async def test_the_watch_writes_nothing_onto_what_it_watches(api: ApiServer, namespace: str, watched: Watched) -> None:
    made = await api.apply(api_contract.service(namespace, "ours"))
    await watched.until({"ours"})
    found = await api.get(SERVICES, namespace=namespace, name="ours")
    assert found["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert "finalizers" not in found["metadata"]


async def test_a_watch_whose_history_is_gone_lists_anew_and_misses_nothing(
    api: ApiServer, namespace: str, cluster: Kube, components: Cluster, watched: Watched
) -> None:
    made = await api.apply(api_contract.service(namespace, "ours"))
    await watched.until({"ours"})
    # Of other kinds: a server that has just started holds nothing older than the newest of all objects.
    leases = [await api.create(_lease(namespace, f"lease-{number}")) for number in range(5)]
    components.stop(API, kill=True)
    components.start(API)
    components.wait_for_api()
    await api.delete(SERVICES, namespace=namespace, name="ours", uid=made["metadata"]["uid"])
    await api.apply(api_contract.service(namespace, "second"))
    path = f"/api/v1/namespaces/{namespace}/services?watch=1&timeoutSeconds=2&resourceVersion="
    told = [
        json.loads(cluster.kubectl("get", f"--raw={path}{each['metadata']['resourceVersion']}").splitlines()[0])
        for each in (made, leases[0])
    ]
    assert [each["object"].get("code") for each in told] == [410, 410]
    await watched.until({"second"})
