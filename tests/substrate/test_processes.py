"""Instances as processes: start, failure, steps, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from substrate.substrate_helpers import fake_programs, processes_with, service, wait_until

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.substrate import processes, rundir
from kllm_operator.substrate.exceptions import (
    AlreadyRunningError,
    ChildFailedError,
    StepRefusedError,
    SubstrateError,
)
from kllm_operator.substrate.instance import Timeouts
from kllm_operator.substrate.processes import ProcessSubstrate
from kllm_operator.substrate.programs import RouterAddress
from kllm_operator.substrate.rundir import RunDirectory

ANY_PORT = RouterAddress(port=0)


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A runtime folder of its own, and the proof that nothing which inherited its name is left."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    assert processes_with("XDG_RUNTIME_DIR", str(tmp_path)) == []
    leftovers = {"token", "state.json", "fleet.json", "zygote.sock"}
    assert not [path for path in tmp_path.rglob("*") if path.name in leftovers]


def substrate(**changes) -> ProcessSubstrate:
    return ProcessSubstrate(service(), programs=fake_programs(), **changes)


def fleet(instances: ProcessSubstrate) -> list[dict]:
    return json.loads(instances.run.fleet_file.read_text())["instances"]


async def started(instances: ProcessSubstrate, tmp_path) -> list[str]:
    instances.preload()
    await instances.resolve_model(tmp_path)
    ids = [await instances.start(role) for role in Role]
    await asyncio.gather(*(instances.serving(instance) for instance in ids))
    return ids


async def test_a_service_starts_and_its_files_say_what_runs(tmp_path):
    events = []
    async with substrate(observer=lambda *event: events.append(event)) as instances:
        ids = await started(instances, tmp_path)
        url = await instances.start_router(ANY_PORT)
        assert ids == ["chat-prefill-0", "chat-decode-0"]
        assert fleet(instances) == [
            {"id": "chat-decode-0", "role": "decode", "agent": "127.0.0.1:1"},
            {"id": "chat-prefill-0", "role": "prefill", "agent": "127.0.0.1:1"},
        ]
        state = RunDirectory("chat").read_state()
        assert state.url == url
        assert state.grpc == "127.0.0.1:2"
        assert {record.id for record in state.processes} == {"zygote", "router-0", *ids}
        assert [seen.state for seen in await instances.observe()] == [InstanceState.SERVING] * 2
        assert ("model", "model", {"event": "progress", "message": "unpacking", "fraction": 0.5}) in events


async def test_starts_are_concurrent(tmp_path):
    async with substrate() as instances:
        await instances.resolve_model(tmp_path)
        ids = [await instances.start(Role.DECODE) for _ in range(3)]
        assert [seen.state for seen in await instances.observe()] == [InstanceState.STARTING] * 3
        await asyncio.gather(*(instances.serving(instance) for instance in ids))


@pytest.mark.parametrize("name", ["chat-decode-0", "agent"])
async def test_an_engine_that_fails_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FAKE_FAIL", name)
    async with substrate() as instances:
        await instances.resolve_model(tmp_path)
        instance = await instances.start(Role.DECODE)
        with pytest.raises(ChildFailedError, match="chat-decode-0 failed: out of luck") as failure:
            await instances.serving(instance)
        await instances.children.failure()
        assert instances.run.log_file(instance).read_text().splitlines()[-1] == "the reason is in the last line"
        assert failure.value.log == instances.run.log_file(instance)
        assert fleet(instances) == []


async def test_a_model_that_cannot_be_had_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "model")
    async with substrate() as instances:
        with pytest.raises(ChildFailedError, match="model failed: out of luck") as failure:
            await instances.resolve_model(tmp_path)
        assert failure.value.log_tail == ("first line of the log", "the reason is in the last line")


async def test_a_router_that_does_not_listen_in_time_is_reported(tmp_path):
    async with substrate(timeouts=Timeouts(router=0.0)) as instances:
        await instances.resolve_model(tmp_path)
        with pytest.raises(ChildFailedError, match="router-0 is not ready after 0 s"):
            await instances.start_router(ANY_PORT)


async def test_an_instance_that_dies_leaves_the_fleet_and_is_told(tmp_path):
    async with substrate() as instances:
        prefill, decode = await started(instances, tmp_path)
        record = next(item for item in instances.run.read_state().processes if item.id == decode)
        os.kill(record.pid, signal.SIGKILL)
        failure = await instances.failure()
        assert (failure.name, failure.why) == (decode, "was ended by SIGKILL")
        assert [item["id"] for item in fleet(instances)] == [prefill]
        assert {seen.id: seen.state for seen in await instances.observe()} == {
            prefill: InstanceState.SERVING,
            decode: InstanceState.FAILED,
        }


async def test_a_stopped_instance_is_gone_and_no_failure(tmp_path):
    async with substrate() as instances:
        prefill, decode = await started(instances, tmp_path)
        await instances.stop(prefill)
        assert [seen.id for seen in await instances.observe()] == [decode]
        assert prefill not in {record.id for record in instances.run.read_state().processes}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instances.failure(), 0.1)
        assert await instances.start(Role.PREFILL) == "chat-prefill-1"


async def test_only_an_instance_that_does_not_serve_yet_can_be_cancelled(tmp_path):
    async with substrate() as instances:
        prefill, _ = await started(instances, tmp_path)
        with pytest.raises(StepRefusedError, match="drain and stop it instead"):
            await instances.cancel(prefill)
        late = await instances.start(Role.DECODE)
        await instances.cancel(late)
        assert late not in {seen.id for seen in await instances.observe()}


async def test_steps_that_make_no_sense_are_refused(tmp_path):
    async with substrate() as instances:
        prefill, _ = await started(instances, tmp_path)
        with pytest.raises(StepRefusedError, match="drain it before its role changes"):
            await instances.flip(prefill, Role.DECODE)
        with pytest.raises(StepRefusedError, match="no instance 'chat-prefill-9'"):
            await instances.stop("chat-prefill-9")


async def test_the_same_service_cannot_run_twice(tmp_path):
    async with substrate() as instances:
        await started(instances, tmp_path)
        with pytest.raises(AlreadyRunningError):
            await substrate().__aenter__()
        assert [seen.state for seen in await instances.observe()] == [InstanceState.SERVING] * 2


async def test_an_exception_leaves_nothing(tmp_path):
    async def broken() -> None:
        async with substrate() as instances:
            await started(instances, tmp_path)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        await broken()


async def test_processes_that_ignore_the_request_to_end_are_killed_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    async with substrate() as instances:
        await started(instances, tmp_path)
        await instances.start_router(ANY_PORT)
        began = time.monotonic()
    assert time.monotonic() - began < 3.0


async def test_what_children_left_in_sessions_of_their_own_ends_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STRAY", "1")
    async with substrate() as instances:
        await started(instances, tmp_path)


async def test_cancellation_in_every_phase_leaves_nothing(tmp_path):
    """Whenever the owner is cancelled, the context ends all."""

    async def whole() -> None:
        async with substrate() as instances:
            await started(instances, tmp_path)
            await instances.start_router(ANY_PORT)
            await asyncio.sleep(600)

    for delay in (0.0, 0.01, 0.1, 0.2, 0.3, 0.5):
        task = asyncio.create_task(whole())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert processes_with("XDG_RUNTIME_DIR", str(tmp_path)) == []


def test_when_the_owner_is_killed_everything_dies_with_it(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kllm_core.objectives import Role\n"
        "from kllm_operator.substrate.processes import ProcessSubstrate\n"
        "from kllm_operator.substrate.programs import RouterAddress\n"
        "from substrate.substrate_helpers import fake_programs, service\n"
        "async def main():\n"
        "    async with ProcessSubstrate(service(), programs=fake_programs()) as instances:\n"
        "        instances.preload()\n"
        "        await instances.resolve_model(Path(sys.argv[1]))\n"
        "        await instances.serving(await instances.start(Role.PREFILL))\n"
        "        await instances.start_router(RouterAddress(port=0))\n"
        "        print('up', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert len(processes_with("XDG_RUNTIME_DIR", str(tmp_path))) == 4
        owner.kill()
    wait_until(lambda: processes_with("XDG_RUNTIME_DIR", str(tmp_path)) == [], seconds=5, what="children die")
    run = RunDirectory("chat")
    run.claim()
    run.release()


async def test_drained_and_flipped_by_the_agent(tmp_path):
    """Drain and switch of role are calls to the agent, with the fleet token."""
    from substrate.fake_agent import FakeAgent

    async with substrate() as instances, FakeAgent() as agent:
        prefill, _ = await started(instances, tmp_path)
        agent.token = instances.run.token_file.read_text()
        instances._instances[prefill].agent = agent.address
        assert await instances.drain(prefill, deadline_seconds=5)
        await instances.flip(prefill, Role.DECODE)
        assert {seen.id: seen.role for seen in await instances.observe()}[prefill] is Role.DECODE
        assert {"id": prefill, "role": "decode", "agent": agent.address} in fleet(instances)
        agent.refuses = True
        assert await instances.drain(prefill, deadline_seconds=5)
        with pytest.raises(StepRefusedError, match="FAILED_PRECONDITION: not empty"):
            await instances.flip(prefill, Role.PREFILL)


async def test_a_wrong_token_is_an_error_of_the_agent(tmp_path):
    from substrate.fake_agent import FakeAgent

    from kllm_operator.substrate import agentcalls
    from kllm_operator.substrate.exceptions import SubstrateError

    async with FakeAgent() as agent:
        with pytest.raises(SubstrateError, match="UNAUTHENTICATED"):
            await agentcalls.drain(agent.address, "wrong", deadline_seconds=1)


async def test_logs_of_those_that_are_gone_stay_for_the_last_twenty_only(tmp_path):
    async with substrate() as instances:
        await instances.resolve_model(tmp_path)
        for _ in range(22):
            name = await instances.start(Role.DECODE)
            instances.run.log_file(f"{name}.engine").touch()
            await instances.cancel(name)
        logs = {path.name for path in instances.run.log_file("x").parent.iterdir()}
        assert not {"chat-decode-1.log", "chat-decode-1.engine.log"} & logs
        assert {"chat-decode-2.log", "chat-decode-2.engine.log", f"{name}.log"} <= logs


async def test_a_disk_that_is_full_starts_nothing_that_nobody_knows_and_the_fleet_is_written_later(
    tmp_path, monkeypatch
):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with substrate() as instances:
        ids = await started(instances, tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(rundir, "write_atomically", full)
            disk.setattr(processes, "write_atomically", full)
            with pytest.raises(SubstrateError, match="No space left on device"):
                await instances.start(Role.DECODE)
            assert [seen.id for seen in await instances.observe()] == sorted(ids)
            await instances.stop(ids[1])
            assert len(fleet(instances)) == 2
        assert [seen.id for seen in await instances.observe()] == [ids[0]]
        assert [item["id"] for item in fleet(instances)] == [ids[0]]
        await instances.serving(await instances.start(Role.DECODE))


async def test_what_someone_removes_from_the_run_directory_is_made_again(tmp_path):
    async with substrate() as instances:
        ids = await started(instances, tmp_path)
        shutil.rmtree(instances.run.log_file("any").parent)
        instances.run.fleet_file.unlink()
        await instances.observe()
        assert [item["id"] for item in fleet(instances)] == sorted(ids)
        await instances.serving(await instances.start(Role.DECODE))
