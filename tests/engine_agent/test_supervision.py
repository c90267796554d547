from __future__ import annotations

import json
import os
import random
import signal
import time

import grpc
import pytest
from engine_agent.harness import authorised, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_engine.agent.ports import free_ports


async def _serving(agents, *flags: str, **options):
    agent = agents("chat-prefill-0")
    await agent.start(*flags, **options)
    await agent.event("serving")
    return agent


async def _health(agent, service: str = "kllm.engine.v1.EngineAgent") -> int:
    stub = health_pb2_grpc.HealthStub(agent.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def _instance(agent) -> engine_pb2.Instance:
    return await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())


async def _state_becomes(watch, wanted: int) -> None:
    while (await watch.read()).state != wanted:
        pass


async def test_an_engine_that_is_fit_serves_and_tells_its_facts(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    serving = await agent.event("serving")
    assert [phase["name"] for phase in serving["phases"]] == ["zygote", "fork", "load", "ready"]
    assert serving["seconds"] >= 0
    instance = await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())
    assert instance.instance_id == "chat-prefill-0"
    assert instance.state == engine_pb2.INSTANCE_STATE_SERVING
    assert instance.role == engine_pb2.ROLE_PREFILL
    assert instance.kv_total_tokens == 16384
    assert list(instance.bindings) == [engine_pb2.BINDING_LATE, engine_pb2.BINDING_EARLY]
    assert instance.incarnation > 0
    assert instance.http_address.startswith("127.0.0.1:")
    assert instance.flippable
    assert await _health(agent) == health_pb2.HealthCheckResponse.SERVING


async def test_a_call_without_the_token_is_refused_and_health_is_open(agents) -> None:
    agent = await _serving(agents)
    for metadata in ((), (("authorization", "Bearer wrong-token-of-some-length"),)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(), metadata=metadata):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await _health(agent) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"hooks_missing": ["Scheduler.run"]}, "hook did not take: Scheduler.run"),
        ({"max_total_num_tokens": 64}, "max-total-tokens"),
        ({"engine_version": "0.5.20"}, "0.5.21"),
        ({"page_size": 1}, "page size is 1, 16 was asked for"),
        ({"problems": ["the moon is full"]}, "the moon is full"),
        ({"role": "decode"}, "runs as decode"),
    ],
)
async def test_an_engine_that_fails_its_self_check_is_refused_and_killed(agents, hello, words) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-hello": json.dumps(hello)})
    failed = await agent.event("failed")
    assert words in failed["message"]
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "the refused engine is gone")


async def test_an_engine_without_optimistic_prefill_serves_early_only(agents) -> None:
    hello = {"optimistic_attempts": 0, "binding_reason": "PipelineParallel"}
    agent = await _serving(agents, engine_args={"fake-hello": json.dumps(hello)})
    instance = await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())
    assert list(instance.bindings) == [engine_pb2.BINDING_EARLY]
    assert instance.binding_reason == "BindingDegraded: PipelineParallel"


async def test_an_engine_that_ends_while_it_starts_is_told_with_its_status_and_log(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-exit": 3})
    message = (await agent.event("failed"))["message"]
    assert "exit status 3" in message
    assert "no room for weights" in message
    assert await agent.exit_code() == 1


async def test_an_engine_that_ends_once_while_it_starts_gets_a_second_try(agents, tmp_path) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-exit-once": str(tmp_path / "ended")})
    await agent.event("serving")
    assert (tmp_path / "ended").exists()


async def test_a_start_that_takes_too_long_is_given_up_naming_the_flag(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start("--start-timeout", "2", engine_args={"fake-silent": True})
    message = (await agent.event("failed"))["message"]
    assert "--start-timeout" in message
    assert "fork" in message
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "the slow engine is gone")


async def test_before_the_engine_serves_its_facts_are_a_failed_precondition_and_health_is_not_serving(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-silent": True})
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert await _health(agent) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_agent_is_alive_from_the_start_and_ready_while_its_instance_serves(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-silent": True})
    assert await _health(agent, "liveness") == health_pb2.HealthCheckResponse.SERVING
    assert await _health(agent, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    other = agents("chat-prefill-1")
    await other.start("--drain-seconds", "20")
    await other.event("serving")
    assert await _health(other, "readiness") == health_pb2.HealthCheckResponse.SERVING
    other.order(do="load", fields={"running_requests": 1})
    watch = other.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=100), metadata=authorised())
    other.process.terminate()
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_DRAINING)
    assert await _health(other, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await _health(other, "liveness") == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_ports_that_are_set_are_the_instances(agents) -> None:
    http, bootstrap = free_ports(2, rng=random.Random())
    agent = await _serving(agents, "--http-port", str(http), "--bootstrap-port", str(bootstrap))
    instance = await _instance(agent)
    assert (instance.http_address, instance.bootstrap_port) == (f"127.0.0.1:{http}", bootstrap)


async def test_load_reports_say_in_one_line_why_an_instance_is_in_its_state(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-silent": True})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=50), metadata=authorised())
    while (await watch.read()).message != "phase load":
        pass
    watch.cancel()
    other = agents("chat-prefill-1")
    await other.start()
    await other.event("serving")
    watch = other.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=50), metadata=authorised())
    assert (await watch.read()).message == ""
    pid = other.part("sglang::scheduler").pid
    os.kill(pid, signal.SIGKILL)
    while (report := await watch.read()).state != engine_pb2.INSTANCE_STATE_FAILED:
        pass
    assert report.message == f"the engine's sglang::scheduler ({pid}) has ended"


@pytest.mark.parametrize("victim", ["sglang::scheduler", "sglang::detokenizer", "main"])
async def test_a_killed_engine_process_fails_the_instance_and_leaves_nothing(agents, victim) -> None:
    agent = await _serving(agents)
    processes = agent.engine_processes()
    assert len(processes) == 3
    pid = processes[0].pid if victim == "main" else agent.part(victim).pid
    os.kill(pid, signal.SIGKILL)
    message = (await agent.event("failed"))["message"]
    assert "ended" in message
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


@pytest.mark.parametrize("victim", ["sglang::scheduler", "sglang::detokenizer", "main"])
async def test_a_stopped_engine_process_withdraws_and_fails_the_instance_and_then_the_engine_is_killed(
    agents, victim
) -> None:
    agent = await _serving(agents)
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    assert (await watch.read()).state == engine_pb2.INSTANCE_STATE_SERVING
    pid = agent.engine_processes()[0].pid if victim == "main" else agent.part(victim).pid
    os.kill(pid, signal.SIGSTOP)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_STARTING)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_FAILED)
    assert (await _instance(agent)).message.startswith("hung: ")
    assert "hung: " in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_all_processes_of_an_engine_that_are_stopped_together_fail_it_too(agents) -> None:
    agent = await _serving(agents)
    for process in agent.engine_processes():
        os.kill(process.pid, signal.SIGSTOP)
    assert "is stopped" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_an_engine_that_goes_on_before_it_is_killed_serves_again_as_the_same_incarnation(agents) -> None:
    agent = await _serving(agents, "--hang-grace-seconds", "30")
    before = await _instance(agent)
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    scheduler = agent.part("sglang::scheduler").pid
    os.kill(scheduler, signal.SIGSTOP)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_FAILED)
    os.kill(scheduler, signal.SIGCONT)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_SERVING)
    after = await _instance(agent)
    assert (after.incarnation, after.message) == (before.incarnation, "")


async def test_an_engine_that_falls_silent_has_failed_until_it_gives_a_sign_of_life(agents) -> None:
    agent = await _serving(agents, "--heartbeat-timeout-seconds", "2", "--hang-grace-seconds", "30")
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_SERVING)
    agent.order(do="silence", on=True)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_FAILED)
    assert await _health(agent) == health_pb2.HealthCheckResponse.NOT_SERVING
    agent.order(do="silence", on=False)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_SERVING)
    watch.cancel()


async def test_a_machine_that_stood_still_as_a_whole_has_no_hung_engines_afterwards(agents) -> None:
    agent = await _serving(agents)
    engine = [process.pid for process in agent.engine_processes()]
    for pid in (*engine, agent.process.pid):
        os.kill(pid, signal.SIGSTOP)
    standstill = time.monotonic() + 3.0
    await until(lambda: time.monotonic() > standstill, "twice the heartbeat timeout")
    agent.process.send_signal(signal.SIGCONT)
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    states = [(await watch.read()).state for _ in range(3)]
    for pid in engine:
        os.kill(pid, signal.SIGCONT)
    states += [(await watch.read()).state for _ in range(5)]
    watch.cancel()
    assert engine_pb2.INSTANCE_STATE_FAILED not in states
    assert states[-1] == engine_pb2.INSTANCE_STATE_SERVING


async def test_a_draining_engine_that_hung_and_came_back_is_draining_still(agents) -> None:
    agent = await _serving(agents, "--hang-grace-seconds", "30")
    agent.order(do="load", fields={"running_requests": 1})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    drain = agent.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised())
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_DRAINING)
    scheduler = agent.part("sglang::scheduler").pid
    os.kill(scheduler, signal.SIGSTOP)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_FAILED)
    os.kill(scheduler, signal.SIGCONT)
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_DRAINING)
    drain.cancel()


async def test_a_long_step_is_a_sign_of_life_and_its_report_does_not_look_old(agents) -> None:
    agent = await _serving(agents)
    agent.order(do="load", fields={"running_requests": 1})
    agent.order(do="mute-load")
    agent.order(do="hang")
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=500), metadata=authorised())
    for _ in range(6):
        report = await watch.read()
        assert report.state == engine_pb2.INSTANCE_STATE_SERVING
        assert report.age_seconds < 2.1
    watch.cancel()


async def test_the_age_of_a_stopped_engines_report_grows(agents) -> None:
    agent = await _serving(agents, "--hang-grace-seconds", "30")
    agent.order(do="load", fields={"running_requests": 1})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    while (await watch.read()).running_requests != 1:
        pass
    os.kill(agent.part("sglang::scheduler").pid, signal.SIGSTOP)
    while (await watch.read()).age_seconds < 1.5:
        pass
    watch.cancel()


async def test_an_http_server_that_accepts_and_never_answers_does_not_hang_the_agent(agents) -> None:
    agent = await _serving(agents)
    agent.order(do="mute-http")
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=200), metadata=authorised())
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_STARTING)
    assert "HTTP server" in (await _instance(agent)).message
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_FAILED)
    assert "HTTP server" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1


async def test_a_scheduler_loop_that_stands_still_with_work_is_hung_and_without_work_is_not(agents) -> None:
    agent = await _serving(agents, "--step-timeout-seconds", "1")
    agent.order(do="hang")
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=500), metadata=authorised())
    for _ in range(4):
        assert (await watch.read()).state == engine_pb2.INSTANCE_STATE_SERVING
    agent.order(do="load", fields={"running_requests": 1})
    message = (await agent.event("failed"))["message"]
    assert "stands still" in message
    assert await agent.exit_code() == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_agent_that_ends_leaves_nothing_of_its_engine(agents, number) -> None:
    agent = await _serving(agents)
    assert len(agent.engine_processes()) == 3
    agent.process.send_signal(number)
    assert await agent.exit_code() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_a_killed_zygote_ends_its_engines_and_their_agents(agents, zygote) -> None:
    agent = await _serving(agents)
    zygote.kill()
    assert "ended" in (await agent.event("failed"))["message"]
    assert await agent.exit_code() == 1
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_on_sigterm_the_agent_drains_before_it_kills_the_engine(agents) -> None:
    agent = await _serving(agents, "--drain-seconds", "20")
    agent.order(do="load", fields={"running_requests": 1})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=100), metadata=authorised())
    while (await watch.read()).running_requests != 1:
        pass
    agent.process.terminate()
    while (await watch.read()).state != engine_pb2.INSTANCE_STATE_DRAINING:
        pass
    assert agent.process.returncode is None
    agent.order(do="load", fields={"running_requests": 0})
    assert await agent.exit_code() == 0
    watch.cancel()


async def test_a_second_sigterm_ends_the_agent_without_the_rest_of_the_drain(agents) -> None:
    agent = await _serving(agents, "--drain-seconds", "600")
    agent.order(do="load", fields={"running_requests": 1})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=100), metadata=authorised())
    while (await watch.read()).running_requests != 1:
        pass
    agent.process.terminate()
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_DRAINING)
    watch.cancel()
    agent.process.terminate()
    assert await agent.exit_code() == 0
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")


async def test_an_engine_that_dies_while_the_agent_drains_fails_it(agents) -> None:
    agent = await _serving(agents, "--drain-seconds", "600")
    agent.order(do="load", fields={"running_requests": 1})
    watch = agent.stub().WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=100), metadata=authorised())
    while (await watch.read()).running_requests != 1:
        pass
    agent.process.terminate()
    await _state_becomes(watch, engine_pb2.INSTANCE_STATE_DRAINING)
    watch.cancel()
    os.kill(agent.part("sglang::scheduler").pid, signal.SIGKILL)
    assert await agent.exit_code() == 1


async def test_sigterm_during_the_start_ends_the_agent_with_success(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(engine_args={"fake-silent": True})
    await until(agent.engine_processes, "the engine was forked")
    agent.process.terminate()
    assert await agent.exit_code() == 0
    await until(lambda: not agent.engine_processes(), "nothing of the engine is left")
