"""A slot keeps everything ready but the server, and becomes what it is told."""

from __future__ import annotations

import json
import os
import signal

import grpc
import pytest
from engine_agent.harness import AgentProcess, authorised, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_engine.agent.processes import inspect

PREFILL, DECODE = engine_pb2.ROLE_PREFILL, engine_pb2.ROLE_DECODE
SLOT, STARTING = engine_pb2.INSTANCE_STATE_SLOT, engine_pb2.INSTANCE_STATE_STARTING
SERVING = engine_pb2.INSTANCE_STATE_SERVING


def _watch(agent: AgentProcess):
    return agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())


async def _becomes(agent: AgentProcess, state: int) -> engine_pb2.LoadReport:
    watch = _watch(agent)
    while (report := await watch.read()).state != state:
        pass
    watch.cancel()
    return report


async def _assume(agent: AgentProcess, role: int, metadata=None) -> engine_pb2.AssumeResponse:
    request = engine_pb2.AssumeRequest(role=role)
    return await agent.stub().Assume(request, metadata=authorised() if metadata is None else metadata)


async def _refused(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details()


async def _health(agent: AgentProcess, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(agent.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def _instance(agent: AgentProcess) -> engine_pb2.Instance:
    return await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())


@pytest.fixture
async def slot(agents) -> AgentProcess:
    agent = agents("chat-engine-0")
    await agent.start_slot()
    await _becomes(agent, SLOT)
    return agent


async def test_a_slot_lives_is_not_ready_and_has_no_role(slot) -> None:
    report = await _watch(slot).read()
    assert not report.HasField("role")
    assert not report.HasField("running_requests")
    assert report.message == "ready to assume a role"
    assert await _health(slot, "liveness") == health_pb2.HealthCheckResponse.SERVING
    assert await _health(slot, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not slot.engine_processes()


async def test_a_slot_has_no_facts_that_a_router_could_take_for_an_instance(slot) -> None:
    code, details = await _refused(_instance(slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "Slot" in details
    code, _ = await _refused(slot.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised()).read())
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    switch = slot.stub().SwitchRole(engine_pb2.SwitchRoleRequest(role=DECODE), metadata=authorised())
    assert (await _refused(switch))[0] is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_slot_serves_as_the_role_that_it_is_told(slot, role) -> None:
    zygotes = slot.zygotes()
    assert (await _assume(slot, role)).state == STARTING
    serving = await slot.event("serving")
    assert [phase["name"] for phase in serving["phases"]] == ["zygote", "fork", "load", "ready"]
    instance = await _instance(slot)
    assert (instance.role, instance.state, instance.incarnation > 0) == (role, SERVING, True)
    assert await _health(slot, "readiness") == health_pb2.HealthCheckResponse.SERVING
    assert (await _watch(slot).read()).role == role
    assert slot.zygotes() == zygotes


async def test_subscribers_hear_of_the_role_as_soon_as_it_is_told(slot) -> None:
    request = engine_pb2.WatchLoadRequest(interval_milliseconds=60_000, deltas=True)
    watch = slot.stub().WatchLoad(request, metadata=authorised())
    assert not (await watch.read()).HasField("role")
    await _assume(slot, DECODE)
    while not (report := await watch.read()).HasField("role"):
        pass
    assert report.role == DECODE
    while not (report.HasField("state") and report.state == SERVING):
        report = await watch.read()
    assert report.message == ""
    watch.cancel()


async def test_who_asks_again_is_answered_alike_and_another_role_is_refused(slot) -> None:
    await _assume(slot, PREFILL)
    assert (await _assume(slot, PREFILL)).state == STARTING
    code, details = await _refused(_assume(slot, DECODE))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "prefill instance" in details
    await slot.event("serving")
    before = await _instance(slot)
    assert (await _assume(slot, PREFILL)).state == SERVING
    assert (await _refused(_assume(slot, DECODE)))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert (await _instance(slot)).incarnation == before.incarnation


async def test_a_role_that_is_none_and_a_caller_without_the_token_change_nothing(slot) -> None:
    assert (await _refused(_assume(slot, 0)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await _refused(_assume(slot, DECODE, metadata=())))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await _watch(slot).read()).state == SLOT


async def test_an_instance_that_was_started_with_a_role_has_assumed_it(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    assert (await _assume(agent, PREFILL)).state == SERVING
    assert (await _refused(_assume(agent, DECODE)))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_role_that_is_told_while_the_zygote_loads_is_served_when_it_has(agents, tmp_path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    agent = agents("chat-engine-0")
    await agent.start_slot(FAKE_ZYGOTE_HOLD=str(hold))
    report = await _becomes(agent, STARTING)
    assert report.message == "phase zygote"
    assert (await _assume(agent, DECODE)).state == STARTING
    hold.unlink()
    await agent.event("serving")
    assert (await _instance(agent)).role == DECODE


async def test_a_zygote_that_dies_is_started_again(slot) -> None:
    (first,) = slot.zygotes()
    os.kill(first, signal.SIGKILL)
    await until(lambda: slot.zygotes() not in ([], [first]), "another zygote")
    await _becomes(slot, SLOT)
    await _assume(slot, PREFILL)
    await slot.event("serving")


async def test_zygotes_that_die_one_after_the_other_fail_the_slot(slot) -> None:
    for _ in range(4):
        await _becomes(slot, SLOT)
        (zygote,) = slot.zygotes()
        os.kill(zygote, signal.SIGKILL)
        await until(lambda zygote=zygote: inspect(zygote) is None, "its end was noticed")
    assert "4 zygotes have ended" in (await slot.event("failed"))["message"]
    assert await slot.exit_code() == 1


async def test_a_zygote_that_cannot_load_fails_the_slot(agents) -> None:
    agent = agents("chat-engine-0")
    await agent.start_slot(FAKE_ZYGOTE_FAILS="1")
    assert "the zygote ended with status 1" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1


async def test_a_slot_that_is_told_to_stop_ends_well_and_leaves_no_zygote(slot) -> None:
    (zygote,) = slot.zygotes()
    slot.process.terminate()
    assert await slot.exit_code() == 0
    assert inspect(zygote) is None


async def test_a_slot_starts_with_the_arguments_of_its_role(agents) -> None:
    flags = [
        word
        for role in ("prefill", "decode")
        for word in (f"--{role}-engine-args", json.dumps({"fake-hello": json.dumps({"kv_type": f"of {role}"})}))
    ]
    agent = agents("chat-engine-0")
    await agent.start_slot(*flags)
    await _assume(agent, DECODE)
    await agent.event("serving")
    assert (await _instance(agent)).kv_type == "of decode"


async def test_an_engine_that_ends_once_is_forked_again_from_the_same_zygote(agents, tmp_path) -> None:
    agent = agents("chat-engine-0")
    await agent.start_slot(engine_args={"fake-exit-once": str(tmp_path / "ended")})
    await _becomes(agent, SLOT)
    zygotes = agent.zygotes()
    await _assume(agent, PREFILL)
    await agent.event("serving")
    assert (tmp_path / "ended").exists()
    assert agent.zygotes() == zygotes


async def test_a_slot_that_serves_is_drained_and_switched_like_any_instance(slot) -> None:
    await _assume(slot, PREFILL)
    await slot.event("serving")
    slot.order(do="load", fields={})
    async for progress in slot.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised()):
        last = progress
    assert last.drained
    code, details = await _refused(_assume(slot, PREFILL))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "Draining" in details
    await slot.stub().SwitchRole(engine_pb2.SwitchRoleRequest(role=DECODE), metadata=authorised())
    assert (await _assume(slot, DECODE)).state == SERVING
