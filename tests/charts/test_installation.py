"""`python -m kllm_operator.crds`, which the chart's jobs run: kinds are brought up to date and checked."""

from __future__ import annotations

import contextlib
import copy

import pytest
import yaml
from aiohttp import web
from charts.chart_helpers import ROOT, of_kind, pods, render
from kube.fake_api import FakeApi

from kllm_operator import crds
from kllm_operator.kube.exceptions import NotFoundError
from kllm_operator.kube.resources import CUSTOM_RESOURCE_DEFINITIONS

KINDS = ROOT / "crds"


class Server(FakeApi):
    """Establishes kinds at the given number of looks after they were applied; never at None.

    Until then their status is that of a kind that nobody has looked at.
    """

    def __init__(self, *, looks=1):
        super().__init__()
        self.looks = looks

    async def get(self, resource, *, namespace, name):
        found = await super().get(resource, namespace=namespace, name=name)
        found["status"] = {"conditions": None}
        if self.looks is not None:
            self.looks -= 1
            if self.looks < 0:
                types = ("NamesAccepted", "Established")
                found["status"] = {"conditions": [{"type": each, "status": "True"} for each in types]}
        return found


@contextlib.asynccontextmanager
async def operator(*answers):
    """An operator whose /readyz gives these answers in turn, the last one for ever."""
    left = list(answers)

    async def readyz(request):
        status = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text="the caches are not filled yet" if status != 200 else "ok")

    app = web.Application()
    app.add_routes([web.get("/readyz", readyz)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(crds, "_PAUSE_SECONDS", 0.01)


@pytest.fixture
def definitions():
    return crds.read_definitions(KINDS)


async def test_kinds_are_applied_and_waited_for(definitions):
    api = Server(looks=3)

    await crds.apply(api, definitions, seconds=5)

    applied = [name for verb, name in api.calls if verb == "apply"]
    assert sorted(applied) == sorted(f"CustomResourceDefinition/{each['metadata']['name']}" for each in definitions)
    assert len(applied) == 3


async def test_applying_again_is_no_change(definitions):
    api = Server(looks=0)
    await crds.apply(api, definitions, seconds=5)
    (first, *_) = api.objects.values()
    version = first["metadata"]["resourceVersion"]

    await crds.apply(api, definitions, seconds=5)

    assert next(iter(api.objects.values()))["metadata"]["resourceVersion"] == version


async def test_kinds_that_are_not_served_in_time_are_told_by_name_and_condition(definitions):
    with pytest.raises(crds.InstallationError, match=r"decodepools\.kllm\.io is not NamesAccepted"):
        await crds.apply(Server(looks=None), definitions, seconds=0.05)


async def test_a_check_finds_kinds_of_another_version(definitions):
    api = Server(looks=0)
    await crds.apply(api, definitions, seconds=5)
    changed = copy.deepcopy(definitions)
    for definition in changed:
        definition["metadata"]["annotations"]["kllm.io/spec-hash"] = "0"

    with pytest.raises(crds.InstallationError, match="another version"):
        await crds.check(api, changed, operator=None, seconds=0.05)


async def test_a_check_of_a_cluster_without_the_kinds_fails(definitions):
    with pytest.raises(NotFoundError):
        await crds.check(Server(), definitions, operator=None, seconds=0.05)


async def test_a_check_waits_for_the_operator(definitions):
    api = Server(looks=0)
    await crds.apply(api, definitions, seconds=5)

    async with operator(503, 503, 200) as url:
        await crds.check(api, definitions, operator=url, seconds=5)


async def test_an_operator_that_does_not_get_ready_is_told_with_its_own_reason(definitions):
    api = Server(looks=0)
    await crds.apply(api, definitions, seconds=5)

    async with operator(503) as url:
        with pytest.raises(crds.InstallationError, match="the caches are not filled yet"):
            await crds.check(api, definitions, operator=url, seconds=0.05)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("kind: Pod", "is no CustomResourceDefinition"),
        ("- a", "is no CustomResourceDefinition"),
        ("a: [", "cannot be read"),
        (None, "there is no CustomResourceDefinition"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, text, trouble):
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)

    with pytest.raises(crds.InstallationError, match=trouble):
        crds.read_definitions(tmp_path)


def test_the_command_line_tells_what_is_wrong_and_fails(tmp_path, capsys):
    assert crds.main(["--kubeconfig", str(tmp_path / "none"), "apply", str(tmp_path)]) == 1
    assert "there is no CustomResourceDefinition" in capsys.readouterr().err


def test_jobs_call_it_as_it_takes_its_arguments(tmp_path):
    documents = render()
    parser = crds._parser()
    for name, command in (("kllm-crds", "apply"), ("kllm-test", "check")):
        (container,) = pods(documents)["Job", name]["spec"]["containers"]
        given = parser.parse_args(container["args"])
        assert given.command == command
        assert container["command"] == ["python3", "-m", "kllm_operator.crds"]
        assert str(given.folder) in {mount["mountPath"] for mount in container["volumeMounts"]}
    (service,) = of_kind(documents, "Service")
    assert (
        given.operator == f"http://{service['metadata']['name']}.kllm-system.svc:{service['spec']['ports'][0]['port']}"
    )


def test_the_role_of_the_job_names_the_kinds_that_there_are():
    (role,) = of_kind(render(), "ClusterRole", "kllm-crds")
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}

    assert names == {yaml.safe_load(path.read_text())["metadata"]["name"] for path in KINDS.iterdir()}
    assert CUSTOM_RESOURCE_DEFINITIONS.plural in role["rules"][0]["resources"]
