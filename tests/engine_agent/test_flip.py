"""A drained instance switches its role on one condition: that it is safe."""

from __future__ import annotations

import json

import grpc
import pytest
from engine_agent.harness import authorised, until

from kllm_core.contracts.engine.v1 import engine_pb2

DECODE = engine_pb2.SwitchRoleRequest(role=engine_pb2.ROLE_DECODE)
PREFILL = engine_pb2.SwitchRoleRequest(role=engine_pb2.ROLE_PREFILL)


async def _serving(agents, *flags: str, load: dict | None = None, **engine_args):
    agent = agents("chat-prefill-0")
    await agent.start(*flags, engine_args=engine_args)
    await agent.event("serving")
    agent.order(do="load", fields=load or {})
    return agent


async def _instance(agent) -> engine_pb2.Instance:
    return await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())


async def _drain(agent) -> engine_pb2.DrainProgress:
    async for progress in agent.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised()):
        last = progress
    return last


async def _switch(agent, request=DECODE) -> engine_pb2.SwitchRoleResponse:
    return await agent.stub().SwitchRole(request, metadata=authorised())


async def _refused(agent, request=DECODE) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _switch(agent, request)
    return refused.value.code(), refused.value.details()


async def test_a_drained_instance_serves_the_other_role_as_a_new_incarnation(agents) -> None:
    agent = await _serving(agents)
    before = await _instance(agent)
    assert before.flippable
    assert (await _drain(agent)).drained
    switched = await _switch(agent)
    after = await _instance(agent)
    assert (after.role, after.state) == (engine_pb2.ROLE_DECODE, engine_pb2.INSTANCE_STATE_SERVING)
    assert after.incarnation == switched.incarnation > before.incarnation
    assert switched.switch_seconds > 0
    assert (after.http_address, after.bootstrap_port) == (before.http_address, before.bootstrap_port)
    assert after.flippable


async def test_subscribers_hear_of_the_new_role_and_of_an_empty_cache(agents) -> None:
    agent = await _serving(agents)
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=60_000), metadata=authorised())
    cache = agent.stub().WatchCache(engine_pb2.WatchCacheRequest(), metadata=authorised())
    first = await cache.read()
    await watch.read()
    await _drain(agent)
    switched = await _switch(agent)
    while (update := await cache.read()).incarnation == first.incarnation:
        pass
    assert update.incarnation == switched.incarnation
    assert update.snapshot.first
    assert update.snapshot.last
    assert not update.snapshot.blocks
    watch.cancel()
    report = await agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(), metadata=authorised()).read()
    assert (report.role, report.state) == (engine_pb2.ROLE_DECODE, engine_pb2.INSTANCE_STATE_SERVING)
    assert report.incarnation == switched.incarnation


async def test_it_can_be_drained_and_switched_again_and_again(agents) -> None:
    agent = await _serving(agents)
    incarnations = set()
    for request in (DECODE, PREFILL, DECODE, PREFILL):
        assert (await _drain(agent)).drained
        incarnations.add((await _switch(agent, request)).incarnation)
    assert len(incarnations) == 4
    assert (await _instance(agent)).role == engine_pb2.ROLE_PREFILL


async def test_a_repeated_question_is_answered_without_another_switch(agents) -> None:
    agent = await _serving(agents)
    await _drain(agent)
    first = await _switch(agent)
    again = await _switch(agent)
    assert (again.incarnation, again.switch_seconds) == (first.incarnation, 0.0)


async def test_who_asks_again_during_a_switch_is_told_of_the_same_one(agents) -> None:
    agent = await _serving(agents)
    await _drain(agent)
    agent.order(do="mute-http")
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=20), metadata=authorised())
    first = agent.stub().SwitchRole(DECODE, metadata=authorised())
    while (await watch.read()).state != engine_pb2.INSTANCE_STATE_STARTING:
        pass
    watch.cancel()
    again = agent.stub().SwitchRole(DECODE, metadata=authorised())
    code, details = await _refused(agent, PREFILL)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "a switch is going on" in details
    (agent.run_dir / f"{agent.instance_id}.plugin.sock.mute").unlink()
    assert (await again).incarnation == (await first).incarnation


async def test_an_instance_that_is_not_drained_is_refused_and_serves_on(agents) -> None:
    agent = await _serving(agents)
    code, details = await _refused(agent)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "drained first" in details
    assert (await _instance(agent)).state == engine_pb2.INSTANCE_STATE_SERVING


async def test_a_drained_instance_cannot_be_switched_to_the_role_that_it_has(agents) -> None:
    agent = await _serving(agents)
    await _drain(agent)
    code, details = await _refused(agent, PREFILL)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "is a prefill instance" in details


async def test_an_instance_with_requests_is_refused_and_drains_on(agents) -> None:
    agent = await _serving(agents, load={"running_requests": 3})
    drain = agent.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised())
    while (await drain.read()).remaining_requests != 3:
        pass
    code, details = await _refused(agent)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "3 requests remain" in details
    assert (await _instance(agent)).state == engine_pb2.INSTANCE_STATE_DRAINING
    drain.cancel()


@pytest.mark.parametrize(
    ("flags", "engine_args", "words"),
    [
        (["--no-flippable"], {}, "started for one role"),
        ([], {"speculative-algorithm": "EAGLE"}, "speculative decoding"),
        ([], {"fake-hello": json.dumps({"flip_obstacle": "its pool is too small"})}, "its pool is too small"),
    ],
)
async def test_an_instance_that_cannot_switch_says_so_and_why(agents, flags, engine_args, words) -> None:
    agent = await _serving(agents, *flags, **engine_args)
    assert not (await _instance(agent)).flippable
    await _drain(agent)
    code, details = await _refused(agent)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert words in details


async def test_a_role_that_is_none_is_an_invalid_argument(agents) -> None:
    agent = await _serving(agents)
    code, details = await _refused(agent, engine_pb2.SwitchRoleRequest())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "ROLE_DECODE" in details


async def test_an_engine_that_refuses_is_drained_as_before(agents) -> None:
    answer = {"success": False, "safe_to_restore": True, "message": "instance is not idle"}
    agent = await _serving(agents, **{"fake-switch": json.dumps(answer)})
    await _drain(agent)
    code, details = await _refused(agent)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "instance is not idle" in details
    instance = await _instance(agent)
    assert (instance.role, instance.state) == (engine_pb2.ROLE_PREFILL, engine_pb2.INSTANCE_STATE_DRAINING)


async def test_an_engine_that_breaks_half_way_fails_the_instance_and_is_killed(agents) -> None:
    answer = {"success": False, "safe_to_restore": False, "message": "the rebuild failed"}
    agent = await _serving(agents, **{"fake-switch": json.dumps(answer)})
    await _drain(agent)
    code, details = await _refused(agent)
    assert code is grpc.StatusCode.INTERNAL
    assert "the rebuild failed" in details
    assert "the rebuild failed" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_an_engine_whose_plugin_is_silent_after_the_switch_fails_the_instance(agents) -> None:
    agent = await _serving(agents, **{"fake-no-hello": True})
    await _drain(agent)
    code, _ = await _refused(agent)
    assert code is grpc.StatusCode.INTERNAL
    assert "plugin said nothing" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1


async def test_who_asks_may_leave_and_the_switch_is_made_to_its_end(agents) -> None:
    agent = await _serving(agents)
    await _drain(agent)
    call = agent.stub().SwitchRole(DECODE, metadata=authorised())
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=20), metadata=authorised())
    while (await watch.read()).state == engine_pb2.INSTANCE_STATE_DRAINING:
        pass
    call.cancel()
    while (await watch.read()).role != engine_pb2.ROLE_DECODE:
        pass
    watch.cancel()
