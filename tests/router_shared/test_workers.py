"""One `kllm-router` with several worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import psutil
import pytest
from router.router_helpers import Client, got
from router.test_process import files, pair, refused, started, streaming, until_ready  # noqa: F401

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_router.scheduling.share import Share
from kllm_router.service_levels import ServiceLevels, Totals
from kllm_router.shared.folder import Folder, new_folder
from kllm_router.shared.levels import LevelsExchange
from kllm_router.shared.told import Told
from kllm_router.shared.workers import WorkerShares

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def metric(port, name):
    for line in (await got(port, "/metrics")).body.decode().splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    return 0.0


async def until_metric(port, name, value):
    async with asyncio.timeout(20):
        while True:
            if await metric(port, name) == value:
                return
            await asyncio.sleep(0.1)


def workers_of(process):
    return {child.pid for child in psutil.Process(process.pid).children()}


def shared_folders():
    return set(Path("/dev/shm").glob("kllm-router-*"))


async def completed(port, *, status=200):
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.post(path="/v1/completions", model="words", prompt="hello", stream=True)
    answer = await client.answer()
    assert answer.status == status
    client.leave()


async def test_workers_serve_one_port_and_stop_together_when_streams_have_finished(files, tmp_path):  # noqa: F811
    before = shared_folders()
    async with pair(tmp_path) as (_, gate), started(*files, "--workers", "3") as (process, port):
        await until_ready(port)
        assert len(workers_of(process)) == 3
        streams = [await streaming(port) for _ in range(6)]
        await until_metric(port, "kllm_router_inflight_requests", 6.0)

        process.send_signal(signal.SIGTERM)
        gate.set()
        for each in streams:
            assert await each.chunk() == b"data: [DONE]\n\n"
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert shared_folders() == before


async def test_one_page_has_the_sums_of_all_workers_and_of_those_that_were_killed(files, tmp_path):  # noqa: F811
    name = 'kllm_router_requests_total{code="200",endpoint="/v1/completions"}'
    async with pair(tmp_path) as (_, gate), started(*files, "--workers", "2") as (process, port):
        gate.set()
        await until_ready(port)
        for _ in range(8):
            await completed(port)
        await until_metric(port, name, 8.0)

        before = workers_of(process)
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        await until_metric(port, "kllm_router_workers_replaced_total", 1.0)
        assert killed not in workers_of(process)
        assert len(workers_of(process) & before) == 1
        await until_ready(port)
        for _ in range(8):
            await completed(port)
        await until_metric(port, name, 16.0)
        assert await metric(port, "kllm_router_inflight_requests") == 0


async def test_connections_wait_for_the_worker_that_replaces_one_and_none_is_refused(files):  # noqa: F811
    async with started(*files, "--workers", "2") as (process, port):
        for pid in workers_of(process):
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(asyncio.wait_for(slow_got(port), 20) for _ in range(8)))

    assert {answer.status for answer in answers} == {200}


async def slow_got(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
    first = await reader.read(1)
    client = Client(reader, writer)
    reader._buffer[:0] = first
    answer = await client.answer()
    client.leave()
    return answer


async def test_a_keys_quota_holds_over_all_workers(files, tmp_path):  # noqa: F811
    keys = tmp_path / "keys"
    keys.write_text("one name=a requests-per-minute=10\n")
    flags = [*files, "--workers", "2", "--api-key-file", str(keys)]
    async with pair(tmp_path) as (_, gate), started(*flags) as (_, port):
        gate.set()
        await until_ready(port)
        statuses = []
        for _ in range(16):
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            client.post(
                path="/v1/completions", model="words", prompt="hello", stream=True,
                headers={"authorization": "Bearer one"},
            )  # fmt: skip
            statuses.append((await client.answer()).status)
            client.leave()
            await asyncio.sleep(0.15)  # several exchanges of the workers
        assert statuses == [200] * 10 + [429] * 6


async def test_the_operator_hears_of_all_workers_whichever_it_reaches(files, tmp_path):  # noqa: F811
    process_flags = [*files, "--workers", "2", "--grpc-listen", "127.0.0.1:0"]
    async with pair(tmp_path) as (_, gate), started_with_grpc(*process_flags) as (port, grpc_port):
        gate.set()
        await until_ready(port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = router_pb2_grpc.ServiceLevelsStub(channel)
            call = stub.WatchServiceLevels(router_pb2.WatchServiceLevelsRequest(interval_milliseconds=100), timeout=20)
            reports = aiter(call)
            first = await anext(reports)
            for _ in range(12):
                await completed(port)
            arrivals, names = first.arrivals, {first.router_id}
            while arrivals < 12:
                report = await anext(reports)
                arrivals += report.arrivals
                names.add(report.router_id)
            assert arrivals == 12
            assert len(names) == 1


@asynccontextmanager
async def started_with_grpc(*arguments):
    """A router, and its ports for HTTP and gRPC."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kllm_router.main", "--listen", "127.0.0.1:0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        event = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        yield int(event["http"].rpartition(":")[2]), int(event["grpc"].rpartition(":")[2])
    finally:
        process.kill()
        await process.wait()


async def test_workers_that_cannot_start_end_it_with_the_reason(files, tmp_path):  # noqa: F811
    before = shared_folders()
    flags = [*files, "--workers", "2", "--listen", "127.0.0.1:0", "--tokenizer", str(tmp_path)]
    result = refused(*flags)

    assert result.returncode == 2
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr
    assert shared_folders() == before


# --- what they tell each other


@pytest.fixture
def folder():
    made = new_folder()
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


async def test_workers_hear_each_other_at_their_next_exchange_and_forget_those_that_hang(folder):
    clock, homes = Clock(), []
    first, second = (
        WorkerShares(Folder(folder, name), on_home=lambda *home: homes.append(home), clock=clock)
        for name in ("0-1", "1-2")
    )
    told = Told(shares={"p0": Share(2, 1, 300)}, homes={"p0": [(1, 11)]})
    first.exchange(told)
    second.exchange(Told())
    assert second.of("p0", clock.now) == Share(2, 1, 300)
    assert homes == [("p0", [(1, 11)], 100.0)]
    assert second.status() == {"up": True, "address": "workers", "problem": "", "routers": 1}

    for _ in range(5):
        clock.now += 0.5
        second.exchange(Told())
    assert second.of("p0", clock.now).in_flight == 0
    first.exchange(told)
    second.exchange(Told())
    assert second.of("p0", clock.now) == Share(2, 1, 300)


async def test_what_a_worker_left_that_is_not_understood_changes_nothing(folder):
    worker = WorkerShares(Folder(folder, "0-1"), on_home=print)
    (folder / "1-2.told").write_bytes(b"garbage")
    worker.exchange(Told())

    assert worker.status()["routers"] == 0


async def test_what_clients_of_all_workers_saw_is_added_up_and_never_falls(folder):
    clock, waiting = Clock(), [0, 3]
    levels = [ServiceLevels("r", waiting=lambda i=i: waiting[i]) for i in range(2)]
    exchanges = [LevelsExchange(Folder(folder, f"{i}-{i}"), each, clock=clock) for i, each in enumerate(levels)]
    levels[0].own.counters["arrivals"] = 5
    levels[1].own.counters["arrivals"] = 7
    levels[1].own.buckets[router_pb2.STAGE_TTFT][3] = 2
    levels[1].own.sums[router_pb2.STAGE_TTFT] = 0.5
    hurried = levels[0].hurried
    for each in (*exchanges, *exchanges):
        each.exchange()

    seen = levels[0].snapshot()
    assert seen.counters["arrivals"] == 12
    assert seen.buckets[router_pb2.STAGE_TTFT][3] == 2
    assert seen.sums[router_pb2.STAGE_TTFT] == 0.5
    assert levels[0].waiting() == 3
    assert hurried.is_set()

    clock.now += 10  # the second one has ended
    exchanges[0].exchange()
    assert levels[0].snapshot().counters["arrivals"] == 12
    assert levels[0].waiting() == 0


async def test_totals_are_the_same_after_they_were_told():
    levels = ServiceLevels("r")
    levels.own.counters["failed"] = 3
    levels.own.sums[router_pb2.STAGE_TPOT] = 1.25

    assert Totals.of(levels.own.numbers()) == levels.own
