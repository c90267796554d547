"""Agents and routers are followed over gRPC, with the fleet token, through restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest
from substrate.polling import polled

from kllm_core.authentication import metadata_is_valid
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_core.objectives import Role
from kllm_operator.fleet import agents as following
from kllm_operator.fleet import stream
from kllm_operator.fleet.agents import Agents
from kllm_operator.fleet.histogram import BUCKETS
from kllm_operator.fleet.levels import LevelReport, StageCounts
from kllm_operator.fleet.watch import FleetWatch
from kllm_operator.substrate.kubernetes_agents import AgentWords

TOKEN = "x" * 32


class Agent(engine_pb2_grpc.EngineAgentServicer):
    """Tells what it is told to tell."""

    def __init__(self):
        self.report = engine_pb2.LoadReport(incarnation=1, running_requests=3, parked_tokens=40, age_seconds=0.25)
        self.facts = engine_pb2.Instance(flippable=True, context_tokens=4096, page_size=16, pacing="prefill=1")
        self.asked = 0

    async def GetInstance(self, _request, context):  # noqa: N802
        await self._check(context)
        self.asked += 1
        self.facts.incarnation = self.report.incarnation
        return self.facts

    async def WatchLoad(self, request, context):  # noqa: N802
        await self._check(context)
        while True:
            yield self.report
            await asyncio.sleep(request.interval_milliseconds / 1000)

    async def _check(self, context):
        if not metadata_is_valid(context.invocation_metadata(), TOKEN):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")


class Router(router_pb2_grpc.ServiceLevelsServicer):
    """Ten arrivals in each report, until it is silent."""

    def __init__(self, name="r"):
        self.name, self.silent, self.unshared = name, False, ""

    async def WatchServiceLevels(self, request, context):  # noqa: N802
        queue = router_pb2.StageLatency(
            stage=router_pb2.STAGE_QUEUE, counts=[10] + [0] * (BUCKETS - 1), sum_seconds=0.01
        )
        while not self.silent:
            yield router_pb2.ServiceLevelReport(
                router_id=self.name, interval_seconds=1.0, arrivals=10, prompt_tokens=1000, stages=[queue],
                unshared=self.unshared,
            )  # fmt: skip
            await asyncio.sleep(request.interval_milliseconds / 1000)


async def listening(servicer, address="127.0.0.1:0"):
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    if isinstance(servicer, Agent):
        engine_pb2_grpc.add_EngineAgentServicer_to_server(servicer, server)
    else:
        router_pb2_grpc.add_ServiceLevelsServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def until(condition):
    async with asyncio.timeout(20):
        await polled(condition)


@pytest.fixture
async def agents():
    made = Agents(TOKEN, listener=lambda: None, interval_seconds=0.05)
    yield made
    await made.close()


async def test_an_agent_is_heard_with_its_facts_and_its_load(agents):
    server, address = await listening(Agent())
    agents.follow({"p0": address})
    await until(lambda: "p0" in agents.told)
    told = agents.told["p0"]

    assert (told.incarnation, told.flippable, told.pacing, told.context_tokens) == (1, True, "prefill=1", 4096)
    assert (told.load.running_requests, told.load.parked_tokens, told.load.queued_requests) == (3, 40, None)
    assert (told.load.age_seconds, told.failed) == (0.25, "")
    await server.stop(None)


async def test_facts_are_asked_for_anew_for_each_incarnation_and_only_then(agents):
    agent = Agent()
    server, address = await listening(agent)
    agents.follow({"p0": address})
    await until(lambda: "p0" in agents.told)
    first = agents.told["p0"].heard_at
    await until(lambda: agents.told["p0"].heard_at > first)
    assert agent.asked == 1
    agent.facts.flippable = False
    agent.report.incarnation = 2
    await until(lambda: agents.told["p0"].incarnation == 2)
    assert not agents.told["p0"].flippable
    await server.stop(None)


async def test_an_agent_that_gave_its_engine_up_says_so(agents):
    agent = Agent()
    server, address = await listening(agent)
    agents.follow({"p0": address})
    await until(lambda: "p0" in agents.told)
    assert agents.told["p0"].failed_at is None
    agent.facts.message = "hung: no sign of life for 3 s"
    agent.report.state = engine_pb2.INSTANCE_STATE_FAILED
    await until(lambda: agents.told["p0"].failed)
    told = agents.told["p0"]
    assert told.failed == "hung: no sign of life for 3 s"
    await until(lambda: agents.told["p0"].heard_at > told.heard_at)
    assert agents.told["p0"].failed_at == told.failed_at
    await server.stop(None)


async def test_what_is_said_again_is_heard_and_wakes_nobody():
    heard = []
    made = Agents(TOKEN, listener=lambda: heard.append(made.told["p0"]), interval_seconds=0.02)
    agent = Agent()
    server, address = await listening(agent)
    made.follow({"p0": address})
    await until(lambda: heard)
    agent.report.age_seconds, agent.report.sequence = 0.75, 99
    await until(lambda: made.told["p0"].load.age_seconds == 0.75)
    told = made.told["p0"]
    await until(lambda: made.told["p0"].heard_at > told.heard_at)
    assert (len(heard), agent.asked) == (1, 1)
    assert replace(told, heard_at=0.0) == replace(heard[0], heard_at=0.0, load=replace(heard[0].load, age_seconds=0.75))
    agent.report.running_requests += 1
    await until(lambda: len(heard) == 2)
    assert heard[1].load.running_requests == told.load.running_requests + 1
    await made.close()
    await server.stop(None)


async def test_routers_that_see_nothing_wake_nobody():
    heard = []
    watch = FleetWatch(TOKEN)
    watch.subscribe(lambda: heard.append(1))
    watch._take("a", LevelReport("a", 1.0, 1.0))
    assert heard == []
    assert watch.forecast(1.0).requests_per_second == 0.0
    watch._take("a", LevelReport("a", 2.0, 1.0, arrivals=1))
    watch._take("a", LevelReport("a", 3.0, 1.0, stages={"ttft": StageCounts((1,))}))
    assert heard == [1, 1]


def test_every_report_of_a_router_is_handed_on_even_if_it_tells_nothing_new():
    heard = []
    watch = FleetWatch(TOKEN, hear=heard.append)
    reports = [LevelReport("a", 1.0, 1.0), LevelReport("a", 2.0, 1.0, arrivals=1)]
    for report in reports:
        watch._take("a", report)
    assert heard == reports


class Call:
    """A gRPC stream that waits for its connection."""

    def __init__(self):
        self.cancelled = False

    async def read(self):
        await asyncio.Event().wait()

    def cancel(self):
        self.cancelled = True


async def test_a_stream_that_is_left_is_ended_and_does_not_wait_for_the_connection_any_more(monkeypatch):
    monkeypatch.setattr(stream, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(stream, "_LEAST_SECONDS", 0.01)

    async def follow(call):
        async for _ in stream.reports(call, interval_seconds=0.001):
            pass

    silent = Call()
    with pytest.raises(TimeoutError):
        await follow(silent)
    assert silent.cancelled

    monkeypatch.setattr(stream, "_FIRST_SECONDS", 60.0)
    left = Call()
    task = asyncio.create_task(follow(left))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert left.cancelled


async def test_an_agent_that_comes_back_is_heard_again(agents):
    server, address = await listening(Agent())
    agents.follow({"p0": address})
    await until(lambda: "p0" in agents.told)
    await server.stop(None)
    gone = agents.told["p0"].heard_at
    server, _ = await listening(Agent(), address)
    await until(lambda: agents.told["p0"].heard_at > gone)
    await server.stop(None)


async def test_who_is_not_followed_any_more_is_forgotten(agents):
    server, address = await listening(Agent())
    agents.follow({"p0": address, "p1": address})
    await until(lambda: len(agents.told) == 2)
    agents.follow({"p1": address})
    assert set(agents.told) == {"p1"}
    await server.stop(None)


async def test_without_the_token_nothing_is_heard():
    server, address = await listening(Agent())
    made = Agents("wrong" * 8, listener=lambda: None, interval_seconds=0.05)
    made.follow({"p0": address})
    await asyncio.sleep(0.3)
    assert made.told == {}
    await made.close()
    await server.stop(None)


async def test_routers_reports_become_demand():
    heard = []
    watch = FleetWatch(TOKEN)
    watch.subscribe(lambda: heard.append(1))
    server, address = await listening(Router())
    watch.follow_routers([address])
    await until(lambda: heard)
    now = asyncio.get_running_loop().time()

    forecast = watch.forecast(now)
    assert forecast.requests_per_second > 0
    assert watch.stages(now, percentile=90, changed_age_seconds=dict.fromkeys(Role).__getitem__).queue.samples >= 10
    await watch.close()
    await server.stop(None)


async def test_exactly_the_routers_that_there_are_are_followed_and_one_that_is_silent_may_hide_traffic():
    now, heard, routers = [0.0], [], [Router("a"), Router("b")]
    watch = FleetWatch(TOKEN, clock=lambda: now[0])
    watch.subscribe(lambda: heard.append(1))
    servers, addresses = zip(*[await listening(each) for each in routers], strict=True)
    watch.follow_routers(addresses)
    assert watch.forecast(0.0).complete
    assert not watch.forecast(6.0).complete
    now[0] = 6.0
    await until(lambda: watch.forecast(6.0).complete)
    assert watch.forecast(6.0).requests_per_second >= 2 * 10 / 10

    routers[1].silent = True
    await servers[1].stop(None)
    now[0] = 12.0
    before = len(heard)
    await until(lambda: len(heard) > before)
    forecast = watch.forecast(12.0)
    assert forecast.requests_per_second > 0
    assert not forecast.complete

    watch.follow_routers(addresses[:1])
    assert watch.forecast(12.0).complete
    watch.follow_routers(())
    assert watch.forecast(20.0).requests_per_second is None
    await watch.close()
    await servers[0].stop(None)


async def test_routers_that_do_not_hear_each_other_say_why_as_long_as_they_are_followed():
    heard, router = [], Router("a")
    watch = FleetWatch(TOKEN)
    watch.subscribe(lambda: heard.append(1))
    server, address = await listening(router)
    watch.follow_routers([address])
    await until(lambda: heard)
    assert watch.unshared == ""

    router.unshared = "no answer in time"
    await until(lambda: watch.unshared == "no answer in time")
    watch.follow_routers(())
    assert watch.unshared == ""
    await watch.close()
    await server.stop(None)


def breaking(times):
    """A listener that breaks down at its first calls, and how often it was called."""
    calls = []

    def listen(*_):
        calls.append(1)
        if len(calls) <= times:
            raise KeyError("no such book")

    return listen, calls


@pytest.fixture
def logged(monkeypatch):
    """What is logged of faults; there is no pause after one."""
    told = []
    monkeypatch.setattr(stream, "_FAULT_SECONDS", 0.01)
    monkeypatch.setattr(stream._log, "exception", lambda event, **more: told.append((event, more["again_seconds"])))
    return told


@pytest.mark.parametrize("kind", [Agents, AgentWords])
async def test_an_agent_whose_report_breaks_something_here_is_followed_on_and_that_is_told(kind, logged):
    listen, calls = breaking(1)
    agent = Agent()
    agent.report.state = engine_pb2.INSTANCE_STATE_SERVING
    server, address = await listening(agent)
    made = kind(TOKEN, listener=listen)
    made.follow({"p0": address})
    await until(lambda: logged == [("StreamFaulty", 0.01)])
    agent.report.state = engine_pb2.INSTANCE_STATE_DRAINING
    await until(lambda: len(calls) > 1)
    await made.close()
    await server.stop(None)


async def test_a_router_whose_report_breaks_something_here_is_followed_on_and_that_is_told(logged):
    listen, calls = breaking(2)
    server, address = await listening(Router())
    watch = FleetWatch(TOKEN)
    watch.subscribe(listen)
    watch.follow_routers([address])
    await until(lambda: len(calls) > 2)
    assert logged == [("StreamFaulty", 0.01), ("StreamFaulty", 0.02)]
    await watch.close()
    await server.stop(None)


async def test_an_agent_that_takes_connections_and_never_answers_has_one_of_them(monkeypatch):
    monkeypatch.setattr(stream, "_LEAST_SECONDS", 0.1)
    monkeypatch.setattr(stream, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(following, "_PAUSE_SECONDS", 0.01)
    connections, sessions = [], []
    monkeypatch.setattr(stream.Line, "was_silent", spied(stream.Line.was_silent, sessions))

    async def take(reader, writer):
        connections.append(writer)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        followed = Agents(TOKEN, listener=lambda: None, interval_seconds=0.02)
        followed.follow({"a": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"})
        await polled(lambda: len(sessions) >= 3)
        assert len(connections) == 1
        await followed.close()


def spied(method, calls):
    async def called(self):
        calls.append(self)
        await method(self)

    return called
