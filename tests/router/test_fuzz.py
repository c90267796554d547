"""Whatever clients send, the router answers with an error of theirs and keeps nothing of it.

KLLM_FUZZ=10000 sends so many requests of each kind, and looks at memory too, except with changed bodies: there the
test's own engines keep each request, so that growth of this process says nothing of the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router.fake_engine import stream
from router.router_helpers import connected, router, until
from router_brain.brain_helpers import write_model

from kllm_router.frontend.openai import OpenAiPreparer

EXAMPLES = int(os.environ.get("KLLM_FUZZ", "250"))
PROPER = {501, 503, 505}
"""Not done here, nobody can serve, and a version that is not spoken."""
MEMORY_KIB = 24 * 1024

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
COMPLETION = {"model": "test-model", "prompt": "Hello", "max_tokens": 4, "stream": True}
FIELDS = [
    *CHAT, *COMPLETION, "temperature", "top_p", "n", "stop", "logprobs", "top_logprobs", "seed", "tools", "tool_choice",
    "response_format", "stream_options", "logit_bias", "echo", "suffix", "user", "best_of", "rid", "bootstrap_host",
    "input_ids", "kllm_resume_output_ids", "regex", "ebnf", "top_k", "min_p", "lora_path", "cache_salt", "x",
]  # fmt: skip

LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from(["", "\0", "\ud83d", "a" * 5000, "data: [DONE]\n\n", "127.0.0.1", "assistant", "function"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "function", "a"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)

LINES = st.sampled_from([
    b"content-length: 2", b"content-length: 5", b"content-length: 0", b"Content-Length : 2", b"content-length: 0x2",
    b"content-length: 99999999999999999999", b"transfer-encoding: chunked", b"transfer-encoding: chunked, chunked",
    b"Transfer-Encoding:\tchunked", b"transfer-encoding: identity", b"host: a", b"host: b", b"host:",
    b"expect: 100-continue",
    b"connection: close", b"connection: keep-alive, upgrade", b"upgrade: websocket", b"x: " + b"y" * 9000,
    b" folded: a",
    b"content-type: application/json", b"x-kllm-timeout-seconds: nan", b"x-request-id: \xff\xfe", b"traceparent: 00",
    b"authorization: Bearer x", b"x\x00: y", b"", b":", b"x: a\r", b"x: \x0b",
])  # fmt: skip
STARTS = st.sampled_from([
    b"POST /v1/chat/completions HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"GET /v1/models HTTP/1.1",
    b"GET /healthz HTTP/1.1", b"GET http://other/healthz HTTP/1.1", b"OPTIONS * HTTP/1.1", b"HEAD /readyz HTTP/1.1",
    b"POST /v1/chat/completions", b"PRI * HTTP/2.0", b"get /healthz HTTP/1.1", b"GET  /healthz HTTP/1.1", b"",
    b"GET /../etc/passwd HTTP/1.1", b"DELETE /v1/models/%00 HTTP/1.1", b"GET /healthz HTTP/1.1 ", b"\x16\x03\x01",
])  # fmt: skip
ENDS = st.sampled_from([b"\r\n", b"\n", b"\r"])
BODIES = st.sampled_from(
    [b"", b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"{" * 300]
)
MESSAGES = st.builds(
    lambda start, lines, end, body: end.join([start, *lines]) + end + end + body,
    STARTS, st.lists(LINES, max_size=6), ENDS, BODIES,
)  # fmt: skip


class Fuzzed:
    """A router that answers at once, and what it kept."""

    def __init__(self, runner, target):
        self.run = runner.run
        self.router = target

    async def tasks(self):
        return len(asyncio.all_tasks()) - 1

    async def idle(self):
        target = self.router
        await until(lambda: not target.server.connections and not target.fleet.inflight and not target.fleet.watches)


@asynccontextmanager
async def serving(folder: Path):
    async with router(head_seconds=1.0, body_seconds=0.3, linger_seconds=0.05) as r:
        r.server.application._preparer = OpenAiPreparer.load(folder, "test-model")
        r.prefill_when_asked()
        r.decode.script = stream("a")
        yield r
        r.server.application._preparer.close()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = serving(folder)
        yield Fuzzed(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture
def kept_nothing(fuzzed):
    """After all requests of a test, neither connections nor tasks nor, after many, memory is left."""
    fuzzed.run(fuzzed.idle())
    before, resident = fuzzed.run(fuzzed.tasks()), []
    yield resident
    fuzzed.run(fuzzed.idle())
    assert fuzzed.run(fuzzed.tasks()) <= before + 2  # one more kept connection to each engine
    if len(resident) >= 5000:
        assert resident[-1] - resident[len(resident) // 2] < MEMORY_KIB


def measure(target, resident):
    """Note the memory in use, without what the test's own engines remember."""
    target.summaries.clear()
    for engine in (target.prefill, target.decode):
        del engine.calls[:-50]  # the scripts of the latest still look for them
    if len(resident) % 500 == 499:
        gc.collect()
    resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4)


def proper(status):
    return status < 500 or status in PROPER


async def sent(target, data):
    """Statuses of all answers to some bytes, after which the client sends nothing more and waits."""
    async with connected(target) as client:
        client.send(data)
        answered = b""
        # A client that stalls, as it may here with the whole machine, is cut off.
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.wait_for(client.reader.read(65536), 60):
                answered += part
    return [int(line[9:12]) for line in answered.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


async def posted(target, path, body):
    while True:
        async with connected(target) as client:
            client.request("POST", path, body)
            # As above.
            with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):
                return await client.answer()


fuzzing = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@fuzzing
@given(changes=CHANGES, chat=st.booleans())
def test_no_body_makes_the_router_fail(fuzzed, kept_nothing, changes, chat):
    document = {**(CHAT if chat else COMPLETION), **changes}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    answer = fuzzed.run(posted(fuzzed.router, path, body))

    assert proper(answer.status), (answer.status, answer.body, body)
    if answer.status != 200:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}


@fuzzing
@given(body=st.binary(max_size=300))
def test_no_bytes_in_a_body_make_the_router_fail(fuzzed, kept_nothing, body):
    answer = fuzzed.run(posted(fuzzed.router, "/v1/completions", body))
    measure(fuzzed.router, kept_nothing)

    assert 400 <= answer.status < 500 or answer.status == 200


@fuzzing
@given(messages=st.lists(MESSAGES, min_size=1, max_size=3), cut=st.integers(0, 40))
def test_no_message_makes_the_router_fail_or_answer_more_than_there_is(fuzzed, kept_nothing, messages, cut):
    data = b"".join(messages)
    data = data[: len(data) - cut] + b"\r\n\r\nGET /none HTTP/1.1\r\nconnection: close\r\nhost: a\r\n\r\n"
    statuses = fuzzed.run(sent(fuzzed.router, data))
    measure(fuzzed.router, kept_nothing)

    assert all(proper(status) or status == 100 for status in statuses), (statuses, data)
    assert len(statuses) <= data.count(b"HTTP/") + data.count(b"100-continue") + 1
