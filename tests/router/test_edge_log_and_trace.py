"""Access log, request ids and trace context at the HTTP edge."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fake_engine import stream
from router.router_helpers import connected, router, until

from kllm_router.frontend.access_log import AccessLog
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.keys import KeyRing, parse_keys
from kllm_router.frontend.trace import NO_TRACE, read_trace

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Log:
    """An access log whose lines can be read."""

    def __init__(self, folder):
        self.path = folder / "access.log"
        self.dropped = 0
        self.log = AccessLog(str(self.path), on_drop=self.drop)

    def drop(self, lines):
        self.dropped += lines

    def lines(self):
        self.log.flush()
        self.log.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


async def test_an_answer_is_a_line_with_what_it_took_and_nothing_of_its_text(log):
    gate = Gate(keys=KeyRing(parse_keys("secret-key name=team")), access_log=log.log)
    async with router(gate=gate) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("the answer")
        headers = {"authorization": "Bearer secret-key", "x-request-id": "mine-1", "traceparent": PARENT}
        client.post(path="/v1/chat/completions?token=hidden", stream=True, secret="the prompt", headers=headers)
        assert (await client.answer()).headers["x-request-id"] == "mine-1"
        client.request("GET", "/healthz")
        await client.answer()

    (line,) = log.lines()
    assert line["request_id"] == "mine-1"
    assert line["trace_id"] == TRACE
    assert (line["key"], line["client"], line["method"]) == ("team", "127.0.0.1", "POST")
    assert (line["path"], line["status"]) == ("/v1/chat/completions", 200)
    assert (line["prefill"], line["decode"], line["attempts"]) == ("p0", "d0", 1)
    assert line["prompt_tokens"] == 3
    assert 0 < line["ttft_seconds"] <= line["seconds"] < 5
    assert line["time"].endswith("+00:00")
    text = log.path.read_text()
    assert not any(secret in text for secret in ("the prompt", "the answer", "secret-key", "hidden"))


async def test_what_is_refused_is_logged_with_the_id_that_the_client_was_told(log):
    gate = Gate(keys=KeyRing(parse_keys("secret-key")), access_log=log.log)
    async with router(gate=gate) as r, connected(r) as client:
        client.post(headers={"authorization": "Bearer wrong"})
        refused = await client.answer()
        assert refused.status == 401
        client.request("GET", "/nowhere" + "x" * 1000)
        assert (await client.answer()).status == 404

    first, second = log.lines()
    assert (first["status"], first["request_id"]) == (401, refused.headers["x-request-id"])
    assert "key" not in first
    assert len(second["path"]) == 200


async def test_a_client_that_leaves_is_logged_as_gone(log):
    async with router(gate=Gate(access_log=log.log)) as r, connected(r) as client:
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        client.leave()
        await until(lambda: r.summaries)

    assert [line["status"] for line in log.lines()] == [499]


def test_a_log_that_cannot_be_written_loses_lines_and_says_how_many(tmp_path):
    lost = []
    log = AccessLog(str(tmp_path / "missing" / "access.log"), on_drop=lost.append)
    log.add({"a": 1})
    log.add({"a": 2})
    log.close()

    assert lost == [2]


def test_a_log_that_is_moved_away_is_begun_anew(tmp_path):
    path = tmp_path / "access.log"
    log = AccessLog(str(path), on_drop=print)
    log.add({"a": 1})
    log.flush()
    log.close()
    path.rename(tmp_path / "old")
    log.add({"a": 2})
    log.close()

    assert json.loads(path.read_text()) == {"a": 2}


async def test_the_trace_of_a_client_reaches_both_engines_as_it_was():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True, headers={"traceparent": PARENT, "tracestate": "a=1,b=2"})
        assert (await client.answer()).status == 200
        for engine in (r.prefill, r.decode):
            assert engine.calls[0].headers["traceparent"] == PARENT
            assert engine.calls[0].headers["tracestate"] == "a=1,b=2"


@pytest.mark.parametrize("given", [{}, {"traceparent": "00-0-0-01"}, {"tracestate": "a=1"}])
async def test_without_a_valid_trace_engines_get_none(given):
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True, headers=given)
        assert (await client.answer()).status == 200
        assert not {"traceparent", "tracestate"} & set(r.decode.calls[0].headers)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT.replace(TRACE, "0" * 32),
        PARENT.replace("00f067aa0ba902b7", "0" * 16),
        PARENT + "-more",
        "ff" + PARENT[2:],
        f"{PARENT}, {PARENT}",
        PARENT + "\r\nx: y",
    ],
)
def test_a_trace_that_is_not_valid_is_left_out(parent):
    assert read_trace({"traceparent": parent}) == NO_TRACE


def test_a_trace_of_a_later_version_may_say_more():
    assert read_trace({"traceparent": f"cc{PARENT[2:]}-what-comes"}).trace_id == TRACE


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_trace_ever_brings_another_header(parent, state):
    lines = read_trace({"traceparent": PARENT + parent, "tracestate": state}).lines

    assert lines.count("\r\n") == lines.count("\n") == lines.count("\r") <= 2
    assert all(not line or line.startswith(("traceparent: ", "tracestate: ")) for line in lines.split("\r\n"))
