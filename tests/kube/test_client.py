"""Calls over real HTTP: what is sent, what is repeated, and what an answer becomes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import pytest
from aiohttp import web

from kllm_operator.kube import client as client_module
from kllm_operator.kube.client import ApiServer
from kllm_operator.kube.exceptions import (
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    NotLeadingError,
    TooManyError,
    UnreachableError,
)
from kllm_operator.kube.login import Login, LoginError
from kllm_operator.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, PODS

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"}}


def status(code, reason="", **more):
    return web.json_response({"kind": "Status", "reason": reason, "message": reason or "told"}, status=code, **more)


class Server:
    """An HTTP server whose answers are scripted.

    Attributes:
        requests: of each: method, path with query, headers, body.
        answers: callables that make a response; the last one stays.
        leading: whether the client may write.
    """

    def __init__(self, folder):
        self.requests, self.answers, self._folder = [], [lambda request: web.json_response(POD)], folder
        self.leading = True
        self.token = folder / "token"
        self.token.write_text("first")

    async def handle(self, request):
        body = await request.text()
        sent = json.loads(body) if body else None
        self.requests.append((request.method, str(request.rel_url), dict(request.headers), sent))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request)

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        path = self._folder / "kubeconfig"
        path.write_text(
            f"""
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{runner.addresses[0][1]}"}}}}]
users: [{{name: u, user: {{tokenFile: {self.token}}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
        )
        login = Login(str(path))
        await login.load()
        calls = Counter()

        def observe(*, verb, resource, code, seconds):
            assert seconds >= 0
            calls[verb, resource, code] += 1

        try:
            async with ApiServer(login, observe=observe, leading=lambda: self.leading) as api:
                self.calls = calls
                yield api
        finally:
            await runner.cleanup()


@pytest.fixture
async def server(tmp_path, monkeypatch):
    # Pauses between attempts are stamina's business.
    import stamina

    with stamina.set_testing(True, attempts=5, cap=True):
        yield Server(tmp_path)


async def test_an_apply_is_forced_strict_and_by_the_operators_name(server):
    async with server.running() as api:
        await api.apply(POD)
        await api.apply_status(POD)
    methods = [(method, url.partition("?")[0], headers["Content-Type"]) for method, url, headers, _ in server.requests]
    assert methods == [
        ("PATCH", "/api/v1/namespaces/default/pods/a", "application/apply-patch+yaml"),
        ("PATCH", "/api/v1/namespaces/default/pods/a/status", "application/apply-patch+yaml"),
    ]
    query = server.requests[0][1].partition("?")[2]
    assert set(query.split("&")) == {"fieldManager=kllm-operator", "force=true", "fieldValidation=Strict"}
    assert server.requests[0][3] == POD


async def test_a_patch_is_a_merge_patch_and_a_delete_names_the_uid(server):
    async with server.running() as api:
        await api.patch(PODS, namespace="default", name="a", body={"metadata": {"uid": "u"}})
        await api.delete(PODS, namespace="default", name="a", uid="u", grace_seconds=3)
    (patch, delete) = server.requests
    assert patch[2]["Content-Type"] == "application/merge-patch+json"
    assert delete[0] == "DELETE"
    assert delete[3]["preconditions"] == {"uid": "u"}
    assert delete[3]["gracePeriodSeconds"] == 3


async def test_objects_outside_of_namespaces_have_their_path(server):
    async with server.running() as api:
        await api.get(CUSTOM_RESOURCE_DEFINITIONS, namespace=None, name="x.kllm.io")
    assert server.requests[0][1] == "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/x.kllm.io"


async def test_a_list_is_read_page_by_page_and_its_items_know_their_kind(server):
    def page(name, following):
        return lambda request: web.json_response(
            {"items": [{"metadata": {"name": name}}], "metadata": {"continue": following}}
        )

    server.answers = [page("a", "next page/1"), page("b", "")]
    async with server.running() as api:
        items = await api.list(PODS, labels="x=y,z")
    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert {(item["apiVersion"], item["kind"]) for item in items} == {("v1", "Pod")}
    assert "labelSelector=x%3Dy,z" in server.requests[0][1]
    assert "continue=next" in server.requests[1][1]


async def test_a_list_that_grew_too_old_between_its_pages_is_read_in_one_piece(server):
    server.answers = [
        lambda request: web.json_response({"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "t"}}),
        lambda request: status(410, "Expired"),
        lambda request: web.json_response({"items": [{"metadata": {"name": "b"}}], "metadata": {}}),
    ]
    async with server.running() as api:
        items = await api.list(PODS)
    assert [item["metadata"]["name"] for item in items] == ["b"]
    assert "limit" not in server.requests[2][1]


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_what_may_pass_is_repeated(server, code):
    server.answers = [
        lambda request: status(code),
        lambda request: status(code),
        lambda request: web.json_response(POD),
    ]
    async with server.running() as api:
        assert await api.apply(POD) == POD
        assert server.calls == {("apply", "pods", str(code)): 2, ("apply", "pods", "200"): 1}


async def test_the_number_of_attempts_is_bounded(server):
    server.answers = [lambda request: status(503)]
    async with server.running() as api:
        with pytest.raises(UnreachableError):
            await api.get(PODS, namespace="default", name="a")
    assert len(server.requests) == 5


async def test_the_server_says_how_long_to_wait(server, monkeypatch):
    error = TooManyError("busy", retry_after=9)
    assert error.retry_after == 9
    server.answers = [lambda request: status(429, headers={"Retry-After": "1"}), lambda request: web.json_response(POD)]
    async with server.running() as api:
        await api.create(POD)
    assert len(server.requests) == 2


async def test_a_create_is_not_repeated_when_it_may_have_been_carried_out(server):
    server.answers = [lambda request: status(500)]
    async with server.running() as api:
        with pytest.raises(UnreachableError):
            await api.create(POD)
    assert len(server.requests) == 1


_WRITES = {
    "create": lambda api: api.create(POD),
    "apply": lambda api: api.apply(POD),
    "apply_status": lambda api: api.apply_status(POD),
    "patch": lambda api: api.patch(PODS, namespace="default", name="a", body={}),
    "delete": lambda api: api.delete(PODS, namespace="default", name="a", uid="u"),
}


@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
async def test_no_attempt_writes_after_the_lease_was_lost(server, write):
    """The first attempt was sent in time, and the answer to it says that it may be sent again."""

    def lose(request):
        server.leading = False
        return status(429)

    server.answers = [lose]
    async with server.running() as api:
        with pytest.raises(NotLeadingError):
            await write(api)
        assert len(server.requests) == 1
        with pytest.raises(NotLeadingError):
            await write(api)
        assert len(server.requests) == 1
        assert sum(count for (_, _, code), count in server.calls.items() if code == "NotLeading") == 2


async def test_a_replica_that_does_not_lead_reads(server):
    server.leading = False
    async with server.running() as api:
        assert await api.get(PODS, namespace="default", name="a") == POD


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [(404, "NotFound", NotFoundError), (409, "Conflict", ConflictError), (403, "Forbidden", ForbiddenError),
     (410, "Gone", GoneError)],
)  # fmt: skip
async def test_what_will_not_pass_is_not_repeated(server, code, reason, error):
    server.answers = [lambda request: status(code, reason)]
    async with server.running() as api:
        with pytest.raises(error):
            await api.get(PODS, namespace="default", name="a")
    assert len(server.requests) == 1


async def test_a_token_that_is_refused_is_read_again_once(server):
    def answer(request):
        fresh = request.headers["Authorization"].lower() == "bearer second"
        return web.json_response(POD) if fresh else status(401, "Unauthorized")

    server.answers = [answer]
    async with server.running() as api:
        server.token.write_text("second")
        assert await api.get(PODS, namespace="default", name="a") == POD
        assert len(server.requests) == 2
        server.token.write_text("first")
        server.answers = [lambda request: status(401, "Unauthorized")]
        with pytest.raises(ForbiddenError):
            await api.get(PODS, namespace="default", name="a")
        assert len(server.requests) == 4


async def test_a_token_that_is_being_replaced_is_a_passing_trouble(server):
    server.answers = [lambda request: status(401, "Unauthorized")]
    async with server.running() as api:
        server.token.unlink()
        with pytest.raises(UnreachableError, match="no way to the API server"):
            await api.get(PODS, namespace="default", name="a")


async def test_the_deletion_of_what_is_gone_is_done(server):
    server.answers = [lambda request: status(404, "NotFound")]
    async with server.running() as api:
        await api.delete(PODS, namespace="default", name="a", uid="u")


async def test_a_deletion_of_an_object_whose_name_another_has_is_done(server):
    other = {**POD, "metadata": {**POD["metadata"], "uid": "other"}}
    server.answers = [lambda request: status(409, "Conflict"), lambda request: web.json_response(other)]
    async with server.running() as api:
        await api.delete(PODS, namespace="default", name="a", uid="u")
        same = {**POD, "metadata": {**POD["metadata"], "uid": "u"}}
        server.answers = [lambda request: status(409, "Conflict"), lambda request: web.json_response(same)]
        with pytest.raises(ConflictError):
            await api.delete(PODS, namespace="default", name="a", uid="u")


@pytest.mark.parametrize("body", ["<html>captive portal</html>", "[]", ""])
async def test_an_answer_that_is_none_of_an_api_server_is_no_answer(server, body):
    server.answers = [lambda request: web.Response(text=body)]
    async with server.running() as api:
        with pytest.raises(UnreachableError, match="not that of an API server"):
            await api.create(POD)


async def test_a_server_that_hangs_or_is_away_is_unreachable(server, monkeypatch):
    async with server.running() as api:
        pass
    async with ApiServer(api._login) as late:
        with pytest.raises(UnreachableError, match="cannot be reached"):
            await late.create(POD)


async def test_a_call_that_hangs_ends(server, monkeypatch):
    import asyncio

    monkeypatch.setattr(client_module, "_REQUEST_SECONDS", 0.2)
    never = asyncio.Event()

    async def hang(request):
        await never.wait()

    server.handle = hang
    async with server.running() as api:
        with pytest.raises(UnreachableError):
            await api.create(POD)
        never.set()


async def test_a_kubeconfig_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LoginError, match="nowhere"):
        await Login(str(tmp_path / "nowhere")).load()


async def test_other_clients_get_the_same_credentials(server):
    async with server.running() as api:
        found = await api._login.credentials()
    assert (found.scheme.lower(), found.token, found.certificate_path) == ("bearer", "first", None)
