"""`kllm bench` against a small OpenAI server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest
from bench.openai_server import Server

from kllm.bench.arrivals import Arrivals
from kllm.bench.load import Load
from kllm.bench.plan import Planned
from kllm.bench.progress import line_of
from kllm.bench.row import Row, Status
from kllm.bench.session import Session
from kllm.bench.settings import Settings
from kllm.commands import bench as command

LOAD = ("--rate", "100", "--duration", "0.1", "--arrivals", "constant", "--isl", "40", "--osl", "4")


@pytest.fixture
async def server():
    async with Server().listening() as listening:
        yield listening


async def start(*arguments: str) -> asyncio.subprocess.Process:
    code = "from kllm.main import main; main()"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "bench", *arguments,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout=60)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, output.decode(), errors.decode()


async def bench(*arguments: str) -> tuple[int, str, str]:
    return await finish(await start(*arguments))


async def test_a_load_is_measured_and_every_kind_of_failure_told_apart(server, tmp_path):
    server.script = ["ok", "503", "break", "error", "silent", "nonsense", "429", "hang", "ok"]
    server.gap = 0.002
    file = tmp_path / "result.json"
    status, output, errors = await bench(
        *LOAD, "--url", server.url, "--api-key", "secret", "--timeout", "1.5", "--warmup", "1",
        "--ttft-ms", "60000", "--tpot-ms", "60000", "--json", str(file),
    )  # fmt: skip
    assert (status, errors) == (0, "")
    assert "10 of 10 requests" in output
    document = json.loads(file.read_text())
    summary = document["summary"]
    assert (summary["ok"], summary["failed"], summary["met"]) == (3, 7, 3)
    assert summary["errors"] == {
        "bad_answer": 1, "broken_stream": 1, "http_429": 1, "http_503": 1, "no_text": 1, "stream_error": 1,
        "timeout": 1,
    }  # fmt: skip
    assert summary["attainment"] == 0.3
    assert summary["wrong_lengths"] == 0
    rows = document["requests"]
    assert [row["scheduled_seconds"] for row in rows] == [index / 100 for index in range(10)]
    good = [row for row in rows if row["status"] == "ok"]
    assert all(row["ttft_seconds"] >= 0.002 and row["tpot_seconds"] > 0.0015 for row in good)
    assert all((row["prompt_tokens"], row["completion_tokens"]) == (40, 4) for row in good)
    assert document["calibration"] == {
        "characters_per_token": 5.0, "overhead_tokens": 3.0, "is_measured": True,
    }  # fmt: skip
    assert document["model"] == "first-model"
    assert document["machine"]["cores"] >= 1
    assert "secret" not in file.read_text() + output
    assert set(server.authorizations) == {"Bearer secret"}
    body = server.bodies[1]
    assert (body["max_tokens"], body["ignore_eos"], body["stream_options"]) == (4, True, {"include_usage": True})


async def test_a_chat_counts_from_its_first_text(server):
    server.tells_usage = False
    settings = Settings(
        rate=100, duration=0.1, arrivals=Arrivals.CONSTANT, isl="40", osl="4", url=f"{server.url}/v1/", chat=True,
        model="mine", ignore_eos=False,
    )  # fmt: skip
    settings.check()
    document = (await Session(settings, settings.plan()).run()).document()
    assert document["summary"]["ok"] == 10
    assert document["summary"]["attainment"] is None
    assert document["calibration"]["is_measured"] is False
    assert {row["completion_tokens"] for row in document["requests"]} == {4}
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert not any("ignore_eos" in body for body in server.bodies)


async def test_ctrl_c_ends_what_is_in_flight_and_still_reports(server, tmp_path):
    server.script = ["hang"]
    file = tmp_path / "result.json"
    process = await start(
        "--rate", "100", "--duration", "1000", "--arrivals", "constant", "--url", server.url, "--max-in-flight", "3",
        "--ttft-ms", "1", "--json", str(file),
    )  # fmt: skip
    await asyncio.wait_for(server.hanging.wait(), timeout=60)
    process.send_signal(signal.SIGINT)
    status, output, errors = await finish(process)
    assert (status, errors) == (130, "")
    assert "interrupted" in output
    summary = json.loads(file.read_text())["summary"]
    assert summary["is_interrupted"] is True
    assert 1 <= summary["unfinished"] <= 3
    assert summary["requests"] < summary["planned"]
    assert summary["attainment"] == 0


async def test_ctrl_c_before_the_load_reports_that_nothing_was_sent(server):
    server.answers_probes = False
    process = await start(*LOAD, "--url", server.url)
    await asyncio.wait_for(server.hanging.wait(), timeout=60)
    process.send_signal(signal.SIGINT)
    status, output, errors = await finish(process)
    assert (status, errors) == (130, "")
    assert "0 of 10 requests in 0.0 s, interrupted" in output


async def test_no_answer_at_all_is_a_failure(server):
    server.script = ["503"]
    status, output, _ = await bench(*LOAD, "--url", server.url)
    assert status == 1
    assert "errors: http_503 10" in output


def test_a_server_that_is_not_there_is_told_plainly(capsys):
    assert command.run(Settings(rate=5, duration=1, url="http://127.0.0.1:1")) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("kllm: http://127.0.0.1:1 does not answer")


async def test_the_same_seed_sends_the_same_trace(server, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,client,input_length,output_length\n0,1,30,2\n5,1,50,3\n10,2,70,1\n20,2,9,9\n")
    settings = Settings(trace=trace, speed=1000, limit=3, seed=7, url=server.url)
    for _ in range(2):
        assert (await Session(settings, settings.plan()).run()).summary.ok == 3
    sent = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert sorted(sent[:3]) == [(135, 2), (235, 3), (335, 1)]
    prompts = [body["prompt"] for body in server.bodies]
    assert sorted(prompts[:3]) == sorted(prompts[3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--rate: give either --rate R --duration S or --trace FILE"),
        (("--rate", "5"), "--duration: --rate needs it"),
        (("--rate", "nan", "--duration", "1"), "--rate: nan must be a number above 0"),
        (("--rate", "1e9", "--duration", "1e9"), "--duration: these are more than 1000000 requests"),
        (("--rate", "5", "--duration", "1", "--speed", "2"), "--speed: it goes with --trace"),
        ((*LOAD, "--osl", "many"), "--osl: 'many' is no distribution of lengths; use N"),
        ((*LOAD, "--url", "ftp://host"), "--url: 'ftp://host' is no address"),
        ((*LOAD, "--ttft-ms", "-1"), "--ttft-ms: -1 must be a number above 0"),
        ((*LOAD, "--json", "/nowhere/at/all.json"), "--json: /nowhere/at/all.json cannot be written"),
        ((*LOAD, "--plot", "picture.gif"), "--plot: picture.gif must end with .png"),
    ],
)
def test_a_wrong_option_is_named_with_its_fix_before_anything_is_sent(arguments, message, capsys):
    from typer.testing import CliRunner

    from kllm.main import app

    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert f"kllm: {message}" in result.output


async def never(content: bytes, row: Row, clock) -> None:
    row.sent = clock()
    await asyncio.get_running_loop().create_future()


def load_of(times, ask, **limits) -> Load:
    plan = [Planned(index, at, 5, 5) for index, at in enumerate(times)]
    return Load(plan, prepare=lambda _: b"", ask=ask, **{"max_in_flight": 100, "drain": 0.0, **limits})


async def test_requests_are_sent_although_none_is_answered():
    load = load_of([0.0, 0.001, 0.002, 0.003], never)
    await load.run(asyncio.Event())
    assert [row.status for row in load.rows] == [Status.UNFINISHED] * 4
    assert all(row.lag >= 0 for row in load.rows)
    assert load.in_flight == 0


async def test_requests_above_the_bound_are_rejected_and_not_sent():
    load = load_of([0.0] * 5, never, max_in_flight=2)
    await load.run(asyncio.Event())
    assert [row.status for row in load.rows] == [Status.UNFINISHED] * 2 + [Status.REJECTED] * 3
    assert [row.sent is None for row in load.rows] == [False, False, True, True, True]
    assert line_of(load).endswith("sent 2/5  in flight 0  ok 0  rejected 3")


async def test_a_stopped_load_sends_nothing_more():
    stop = asyncio.Event()

    async def stopping(content: bytes, row: Row, clock) -> None:
        stop.set()
        await never(content, row, clock)

    load = load_of([0.0, 1000.0], stopping, drain=1000.0)
    await asyncio.wait_for(load.run(stop), timeout=30)
    assert len(load.rows) == 1


async def test_an_unexpected_error_is_not_swallowed():
    async def broken(content: bytes, row: Row, clock) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await load_of([0.0], broken).run(asyncio.Event())
