"""Malformed requests are answered with 4xx in OpenAI's form and never reach an engine."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from service_under_test import Service, held

pytestmark = pytest.mark.engines

CHAT = "/v1/chat/completions"
GOOD = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def computed(service: Service) -> int:
    """Prompt tokens that engines have computed since they began."""
    return sum((instance["load"] or {}).get("total_prefill_tokens") or 0 for instance in service.instances())


@pytest.fixture
def untouched(service: Service):
    before = computed(service)
    yield
    assert held(service) == {}
    assert computed(service) == before


DEEP = "[" * 5000 + "]" * 5000

RAW = {
    "not json": (b"{", 400),
    "empty": (b"", 400),
    "a list": (b"[]", 400),
    "a number": (b"1", 400),
    "not utf-8": (b'{"model": "\xff\xfe"}', 400),
    "a lone surrogate": (b'{"model": "test-model", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    "deep nesting": (f'{{"model": "test-model", "messages": {DEEP}}}'.encode(), 400),
    "deep nesting in an unknown field": (json.dumps(GOOD)[:-1].encode() + f', "x": {DEEP}}}'.encode(), 400),
    "not a number": (json.dumps(GOOD)[:-1].encode() + b', "temperature": NaN}', 400),
    "ten megabytes": (json.dumps(GOOD | {"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode(), 413),
}

IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]

FIELDS = {
    "messages missing": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "messages"),
    "messages text": ({"messages": "Hello"}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "messages"),
    "message with wrong content": ({"messages": [{"role": "user", "content": 1}]}, "messages"),
    "message with NUL": ({"messages": [{"role": "user", "content": "a\x00b"}]}, "messages"),
    "image": ({"messages": [{"role": "user", "content": IMAGE}]}, "messages"),
    "max_tokens text": ({"max_tokens": "many"}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": 10**12}, "max_tokens"),
    "temperature": ({"temperature": -0.1}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "stream text": ({"stream": "yes"}, "stream"),
    "stop": ({"stop": 5}, "stop"),
    "n": ({"n": 3}, "n"),
    "tools": ({"tools": "x"}, "tools"),
    "response_format": ({"response_format": {"type": "yaml"}}, "response_format"),
    "bootstrap_host": ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    "bootstrap_port": ({"bootstrap_port": 1}, "bootstrap_port"),
    "bootstrap_room": ({"bootstrap_room": 1}, "bootstrap_room"),
    "rid": ({"rid": "x"}, "rid"),
    "routed_dp_rank": ({"routed_dp_rank": 0}, "routed_dp_rank"),
    "input_ids": ({"input_ids": [1]}, "input_ids"),
    "custom_logit_processor": ({"custom_logit_processor": "x"}, "custom_logit_processor"),
}  # fmt: skip


def check_error(answer: httpx2.Response, status: int, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    if param is not None:
        assert error["param"] is not None
        assert error["param"].startswith(param)


@pytest.mark.parametrize("case", RAW)
async def test_a_malformed_body_is_refused(http: httpx2.AsyncClient, untouched, case):
    content, status = RAW[case]

    answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})

    check_error(answer, status)


@pytest.mark.parametrize("case", FIELDS)
async def test_a_wrong_field_is_refused_by_name(http: httpx2.AsyncClient, untouched, case):
    fields, param = FIELDS[case]

    check_error(await http.post(CHAT, json=GOOD | fields), 400, param)


async def test_an_unknown_model_is_not_found(http: httpx2.AsyncClient, untouched):
    answer = await http.post(CHAT, json=GOOD | {"model": "other"})

    check_error(answer, 404)
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_prompt_over_the_context_is_refused(http: httpx2.AsyncClient, untouched):
    answer = await http.post(CHAT, json=GOOD | {"messages": [{"role": "user", "content": "word " * 20_000}]})

    check_error(answer, 400)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/models", 405), ("POST", "/generate", 404), ("POST", "/abort_request", 404),
     ("POST", "/pd_role_switch", 404), ("GET", "/server_info", 404), ("POST", "/v1/../generate", 404)],
)  # fmt: skip
async def test_the_engines_own_routes_are_not_reachable(http: httpx2.AsyncClient, untouched, method, path, status):
    check_error(await http.request(method, path, json={}), status)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
    ],
)
async def test_ambiguous_or_oversized_heads_end_the_connection(service: Service, untouched, head):
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)

    async with asyncio.timeout(10):
        answer = await reader.read()

    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    writer.close()


async def test_engines_refuse_calls_without_the_fleet_token(service: Service, http: httpx2.AsyncClient):
    answer = await http.post(CHAT, json=GOOD)
    assert answer.status_code == 200
    for instance in service.instances():
        async with httpx2.AsyncClient(timeout=10) as client:
            refused = await client.post(f"http://{instance['http_address']}/generate", json={"input_ids": [1, 2]})
        assert refused.status_code == 401
