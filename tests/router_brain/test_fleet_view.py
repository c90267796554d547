from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from router_brain.brain_helpers import wait_until
from router_brain.fleet_helpers import IDS, follow, heard, other, request, shown
from router_brain.scripted_agent import ScriptedAgent

from kllm_core.blocks import block_hashes
from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Binding, Role
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import ApiError, Endpoint, EventKind
from kllm_router.proxy.fleet_view import AgentFleetView
from kllm_router.scheduling.silence import Awaited


def come_and_go(view: AgentFleetView) -> set[str]:
    """Where a prompt is sent that each time leaves before it is computed, so that nothing is expected of it."""
    chosen = set()
    for _ in range(4):
        endpoint = view.choose_prefill(request())
        view.finished(request().rid, endpoint)
        chosen.add(endpoint.instance_id)
    return chosen


async def test_an_instance_gets_nothing_before_its_milestones_are_heard(
    agents: list[ScriptedAgent], views: Callable[..., AgentFleetView]
):
    agents[0].subscribable.clear()
    made = views()
    follow(made, agents[:1])
    await wait_until(lambda: "p0" in made.book.records and agents[0].asked)
    assert made.book.records["p0"].endpoint is None

    agents[0].subscribable.set()
    await wait_until(lambda: made.book.records["p0"].endpoint is not None)
    with made.watch("r1", made.book.records["p0"].endpoint) as watch:
        agents[0].tell("r1", "PREFILL_DONE")
        assert (await heard(watch)).kind is EventKind.PREFILL_DONE


async def test_an_address_where_another_instance_answers_is_not_the_instance(
    agents: list[ScriptedAgent], views: Callable[..., AgentFleetView]
):
    """Addresses of pods are used again."""
    made = views()
    ended = DiscoveredInstance("p9", Role.PREFILL, agents[0].address)
    made.book.apply([ended, DiscoveredInstance("p0", Role.PREFILL, agents[0].address)])
    await wait_until(lambda: made.book.records["p0"].endpoint is not None and "p0" in made.book.records["p9"].problem)
    assert made.book.records["p9"].endpoint is None


async def test_the_fleet_is_known_when_all_have_answered_and_stays_so(
    agents: list[ScriptedAgent], views: Callable[..., AgentFleetView]
):
    made = views(hearing_seconds=3600)
    assert not made.known
    follow(made, agents[:2])
    assert not made.known
    await wait_until(lambda: made.known)
    made.book.apply([DiscoveredInstance("away", Role.PREFILL, "127.0.0.1:9")])
    assert made.known


async def test_the_fleet_is_known_when_those_who_do_not_answer_had_time_to(views: Callable[..., AgentFleetView]):
    made = views(hearing_seconds=0.1)
    made.book.apply([DiscoveredInstance("away", Role.PREFILL, "127.0.0.1:9")])
    assert not made.known
    await wait_until(lambda: made.known)


async def test_a_fleet_without_instances_is_known(views: Callable[..., AgentFleetView]):
    made = views(hearing_seconds=3600)
    made.book.apply([])
    assert made.known


async def test_instances_are_known_by_what_their_agents_say(view: AgentFleetView):
    endpoint = view.choose_prefill(request())

    assert endpoint.http_host == "127.0.0.1"
    assert (endpoint.http_port, endpoint.bootstrap_host, endpoint.bootstrap_port) == (30000, "127.0.0.1", 31000)
    assert view.choose_decode(request(), endpoint).role is Role.DECODE
    assert view.binding(endpoint) is Binding.LATE
    assert view.limits().context_tokens == 2048
    assert view.limits().kv_tokens == 10_000
    assert shown(view, "p0")["state"] == "Serving"
    assert sorted(view.fleet().instances) == ["d0", "d1", "p0", "p1"]


async def test_load_moves_choices(view: AgentFleetView, agents: list[ScriptedAgent]):
    agents[0].load(queued_uncached_tokens=50_000)
    agents[2].load(running_requests=40)
    await wait_until(lambda: shown(view, "p0")["load"]["queued_uncached_tokens"] == 50_000)
    await wait_until(lambda: shown(view, "d0")["load"]["running_requests"] == 40)

    for _ in range(4):
        endpoint = view.choose_prefill(request())
        assert endpoint.instance_id == "p1"
        assert view.choose_decode(request(), endpoint).instance_id == "d1"


async def test_requests_in_flight_spread_before_any_load_shows_them(view: AgentFleetView, agents: list[ScriptedAgent]):
    for agent in agents:
        agent.silent = True
    chosen = []
    for n in range(8):
        sent = request(f"{n:032x}", list(range(n * 1000, n * 1000 + 500)))
        endpoint = view.choose_prefill(sent)
        view.started(sent.rid, endpoint, 500)
        chosen.append(endpoint)

    assert sorted(endpoint.instance_id for endpoint in chosen) == ["p0"] * 4 + ["p1"] * 4
    assert view.status()["in_flight"] == 8
    for n, endpoint in enumerate(chosen):
        view.finished(f"{n:032x}", endpoint)
        view.finished(f"{n:032x}", endpoint)
    assert view.status()["in_flight"] == 0
    assert view.book.records["p0"]._unreported_tokens == 0


async def test_a_cached_prefix_draws_requests_until_it_is_gone(view: AgentFleetView, agents: list[ScriptedAgent]):
    blocks = block_hashes(IDS, 4)
    snapshot = engine_pb2.CacheSnapshot(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=blocks, first=True, last=True)
    agents[1].change_cache(engine_pb2.CacheUpdate(sequence=7, snapshot=snapshot))
    await wait_until(lambda: shown(view, "p1")["cached_blocks"] == 10)
    agents[0].load(queued_uncached_tokens=10)
    agents[1].load(queued_uncached_tokens=20)
    await wait_until(lambda: shown(view, "p0")["load"]["queued_uncached_tokens"] == 10)
    await wait_until(lambda: shown(view, "p1")["load"]["queued_uncached_tokens"] == 20)
    assert come_and_go(view) == {"p1"}

    removed = engine_pb2.BlocksRemoved(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=blocks[:1])
    agents[1].change_cache(engine_pb2.CacheUpdate(sequence=8, removed=removed))
    await wait_until(lambda: shown(view, "p1")["cached_blocks"] == 9)
    assert come_and_go(view) == {"p0"}


async def test_a_gap_in_the_cache_stream_is_filled_by_a_snapshot(view: AgentFleetView, agents: list[ScriptedAgent]):
    stored = engine_pb2.BlocksStored(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=[1])
    snapshot = engine_pb2.CacheSnapshot(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=[], first=True, last=True)
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=3, snapshot=snapshot))
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=5, stored=stored))

    await wait_until(lambda: len(agents[0].cache_requests) == 2)

    assert agents[0].cache_requests[1].from_sequence == 0
    assert shown(view, "p0")["cached_blocks"] == 0


async def test_after_a_reconnect_the_cache_stream_goes_on_where_it_was(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    snapshot = engine_pb2.CacheSnapshot(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=[1], first=True, last=True)
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=3, snapshot=snapshot))
    await wait_until(lambda: shown(view, "p0")["cached_blocks"] == 1)

    agents[0].end_streams()
    await wait_until(lambda: len(agents[0].cache_requests) == 2)

    assert (agents[0].cache_requests[1].incarnation, agents[0].cache_requests[1].from_sequence) == (1, 4)
    assert shown(view, "p0")["cached_blocks"] == 1


async def test_events_reach_their_watch_in_order_and_no_other(view: AgentFleetView, agents: list[ScriptedAgent]):
    endpoint = view.book.records["p0"].endpoint
    with view.watch("r1", endpoint) as first, view.watch("r2", endpoint) as second:
        agents[0].tell("r1", "PREFILL_DONE", prompt_tokens=40, cached_tokens=8, queue_seconds=0.5, prefill_seconds=0.25)
        agents[0].tell("r1", "RELEASED", reason="Transferred")
        agents[0].tell("r2", "PREFILL_DONE", incarnation=99)
        agents[0].tell("r2", "FAILED", message="no room")
        agents[1].tell("r1", "FAILED")

        done, released, failed = await heard(first), await heard(first), await heard(second)

    assert (done.kind, done.cached_tokens, done.queue_seconds, done.prefill_seconds) == (
        EventKind.PREFILL_DONE, 8, 0.5, 0.25,
    )  # fmt: skip
    assert (released.kind, released.reason) == (EventKind.RELEASED, "Transferred")
    assert (failed.kind, failed.message) == (EventKind.FAILED, "no room")


async def test_a_cancelled_wait_loses_no_event(view: AgentFleetView, agents: list[ScriptedAgent]):
    with view.watch("r1", view.book.records["p0"].endpoint) as watch:
        waiting = asyncio.create_task(watch.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        agents[0].tell("r1", "PREFILL_DONE")
        assert (await heard(watch)).kind is EventKind.PREFILL_DONE


async def test_an_agent_that_dies_loses_its_requests_and_gets_nothing_new(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    endpoint = view.book.records["p0"].endpoint
    with view.watch("r1", endpoint) as watch:
        await agents[0].stop()
        lost = await heard(watch)

    assert (lost.kind, lost.instance_id) == (EventKind.INSTANCE_LOST, "p0")
    await wait_until(lambda: {view.choose_prefill(request()).instance_id for _ in range(4)} == {"p1"})
    await agents[0].start()
    await wait_until(lambda: shown(view, "p0")["connected"])
    await wait_until(lambda: {view.choose_prefill(other(n)).instance_id for n in range(4)} == {"p0", "p1"})


async def test_an_engine_without_a_sign_of_life_loses_its_requests_and_gets_nothing_new(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    with view.watch("r1", view.book.records["d0"].endpoint) as watch:
        agents[2].age = 3.5
        lost = await heard(watch)

    assert (lost.kind, lost.reason) == (EventKind.INSTANCE_LOST, "Silent")
    prefill = view.book.records["p0"].endpoint
    assert {view.choose_decode(request(), prefill).instance_id for _ in range(4)} == {"d1"}
    assert shown(view, "d0")["silent"]
    agents[2].age = 0.1
    await wait_until(lambda: {view.choose_decode(request(), prefill).instance_id for _ in range(4)} == {"d0", "d1"})


async def test_an_instance_that_says_that_it_failed_loses_its_requests(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    with view.watch("r1", view.book.records["d0"].endpoint) as watch:
        agents[2].facts.state = engine_pb2.INSTANCE_STATE_FAILED
        lost = await heard(watch)
    assert (lost.kind, lost.reason) == (EventKind.INSTANCE_LOST, "Failed")


async def test_an_instance_that_took_the_other_role_is_chosen_for_it(view: AgentFleetView, agents: list[ScriptedAgent]):
    with view.watch("r1", view.book.records["d0"].endpoint) as watch:
        agents[2].facts.role, agents[2].facts.incarnation = engine_pb2.ROLE_PREFILL, 2
        assert (await heard(watch)).kind is EventKind.INSTANCE_LOST
    await wait_until(lambda: shown(view, "d0")["role"] == "prefill")
    assert view.choose_prefill(request(), excluded=frozenset({"p0", "p1"})).instance_id == "d0"
    assert view.choose_decode(request(), view.book.records["p0"].endpoint).instance_id == "d1"


async def test_an_instance_that_fails_too_often_gets_nothing_until_it_passes(view: AgentFleetView):
    endpoint = view.book.records["p0"].endpoint
    for _ in range(5):
        view.judge(endpoint, passed=False)

    assert {view.choose_prefill(request()).instance_id for _ in range(4)} == {"p1"}
    assert shown(view, "p0")["ejected_seconds"] > 0
    assert view.ejected(Role.PREFILL) == 1
    # What has failed this request is worse than what has failed others.
    assert view.choose_prefill(request(), excluded=frozenset({"p1"})).instance_id == "p0"
    view.judge(endpoint, passed=True)
    assert {view.choose_prefill(other(n)).instance_id for n in range(4)} == {"p0", "p1"}


async def test_the_instance_that_computed_a_prompt_before_is_preferred_while_it_serves(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    assert {view.choose_prefill(request(), prefer="p1").instance_id for _ in range(4)} == {"p1"}
    agents[1].facts.state = engine_pb2.INSTANCE_STATE_DRAINING
    await wait_until(lambda: shown(view, "p1")["state"] == "Draining")
    assert view.choose_prefill(request(), prefer="p1").instance_id == "p0"


async def test_a_silent_engine_is_asked_about_by_its_load(view: AgentFleetView, agents: list[ScriptedAgent]):
    endpoint = view.book.records["d0"].endpoint
    assert view.has_lost(endpoint, 4.0, Awaited.TOKENS)
    agents[2].load(running_requests=1)
    await wait_until(lambda: not view.has_lost(endpoint, 4.0, Awaited.TOKENS))
    assert view.has_lost(dataclasses.replace(endpoint, incarnation=9), 4.0, Awaited.TOKENS)


async def test_a_stream_that_breaks_and_comes_back_at_once_loses_nothing(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    with view.watch("r1", view.book.records["p0"].endpoint) as watch:
        agents[0].end_streams()
        await wait_until(lambda: agents[0].subscribed == 2)
        agents[0].tell("r1", "PREFILL_DONE")

        assert (await heard(watch)).kind is EventKind.PREFILL_DONE


async def test_a_restarted_engine_loses_its_requests_and_its_cache(view: AgentFleetView, agents: list[ScriptedAgent]):
    snapshot = engine_pb2.CacheSnapshot(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=[1], first=True, last=True)
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=3, snapshot=snapshot))
    await wait_until(lambda: shown(view, "p0")["cached_blocks"] == 1)
    endpoint = view.book.records["p0"].endpoint
    with view.watch("r1", endpoint) as watch:
        agents[0].facts.incarnation = 2
        assert (await heard(watch)).kind is EventKind.INSTANCE_LOST

    assert shown(view, "p0")["cached_blocks"] == 0
    assert view.book.records["p0"].endpoint.incarnation == 2
    with view.watch("r2", endpoint) as watch:
        assert (await heard(watch)).kind is EventKind.INSTANCE_LOST
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=1, cleared=engine_pb2.CacheCleared()))
    stored = engine_pb2.BlocksStored(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=[7, 8])
    agents[0].change_cache(engine_pb2.CacheUpdate(sequence=2, stored=stored))
    await wait_until(lambda: shown(view, "p0")["cached_blocks"] == 2)
    assert len(agents[0].cache_requests) == 1


async def test_an_instance_that_leaves_loses_its_requests(view: AgentFleetView, agents: list[ScriptedAgent]):
    endpoint = view.book.records["p0"].endpoint
    view.started("r1", endpoint, 10)
    with view.watch("r1", endpoint) as watch:
        follow(view, agents[1:])
        assert (await heard(watch)).kind is EventKind.INSTANCE_LOST

    assert view.status()["in_flight"] == 0
    assert view.choose_prefill(request()).instance_id == "p1"


@pytest.mark.parametrize("state", ["DRAINING", "FAILED", "STARTING"])
async def test_only_serving_instances_are_chosen(view: AgentFleetView, agents: list[ScriptedAgent], state: str):
    agents[0].facts.state = getattr(engine_pb2, f"INSTANCE_STATE_{state}")
    await wait_until(lambda: shown(view, "p0")["state"] == state.capitalize())
    assert {view.choose_prefill(request()).instance_id for _ in range(4)} == {"p1"}
    agents[1].facts.state = agents[0].facts.state
    await wait_until(lambda: not view.ready)

    with pytest.raises(ApiError) as caught:
        view.choose_prefill(request())

    assert caught.value.status == 503
    assert caught.value.retry_after


async def test_an_instance_that_failed_the_request_is_left_out(view: AgentFleetView):
    endpoint = view.choose_prefill(request(), excluded=frozenset({"p0"}))
    assert endpoint.instance_id == "p1"
    assert view.choose_decode(request(), endpoint, excluded=frozenset({"d0"})).instance_id == "d1"
    with pytest.raises(ApiError) as caught:
        view.choose_prefill(request(), excluded=frozenset({"p0", "p1"}))
    assert caught.value.status == 503


async def test_a_request_that_fits_no_decode_instance_is_the_clients_error(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    for agent in agents[2:]:
        agent.load(kv_total_tokens=50)
    await wait_until(lambda: all(shown(view, name)["load"].get("kv_total_tokens") == 50 for name in ("d0", "d1")))

    with pytest.raises(ApiError) as caught:
        view.choose_decode(request(max_new_tokens=60), view.book.records["p0"].endpoint)

    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_late_binding_is_not_asked_of_an_instance_that_cannot_do_it(
    views: Callable[..., AgentFleetView], agents: list[ScriptedAgent]
):
    del agents[0].facts.bindings[:]
    agents[0].facts.bindings.append(engine_pb2.BINDING_EARLY)
    view = views()
    follow(view, agents)
    await wait_until(lambda: view.book.records["p0"].endpoint is not None)

    assert view.binding(view.book.records["p0"].endpoint) is Binding.EARLY
    assert view.binding(Endpoint("gone", Role.PREFILL, "h", 1)) is Binding.EARLY


async def test_who_can_bind_late_can_bind_just_in_time_and_others_bind_early(
    views: Callable[..., AgentFleetView], agents: list[ScriptedAgent]
):
    agents[1].facts.bindings[:] = [engine_pb2.BINDING_EARLY]
    view = views(binding=Binding.JUST_IN_TIME)
    follow(view, agents)
    await wait_until(lambda: all(view.book.records[name].endpoint is not None for name in ("p0", "p1")))

    bindings = {name: view.binding(view.book.records[name].endpoint) for name in ("p0", "p1")}
    assert bindings == {"p0": Binding.JUST_IN_TIME, "p1": Binding.EARLY}


async def test_an_agent_without_a_server_is_followed_until_it_has_one(
    views: Callable[..., AgentFleetView], agents: list[ScriptedAgent]
):
    facts, agents[0].facts = agents[0].facts, None
    view = views()
    follow(view, agents[:1])
    await wait_until(lambda: shown(view, "p0")["message"] == "no server yet")

    agents[0].facts = facts

    await wait_until(lambda: shown(view, "p0")["state"] == "Serving")


async def test_a_wrong_token_is_told_in_the_status(views: Callable[..., AgentFleetView], agents: list[ScriptedAgent]):
    view = views(token="another-token-of-some-length")
    follow(view, agents[:1])

    await wait_until(lambda: "UNAUTHENTICATED" in shown(view, "p0")["message"])

    assert not view.ready


async def test_whoever_waits_for_an_instance_hears_when_one_begins_to_serve(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    decoders = [agent for agent in agents if agent.role is Role.DECODE]
    for agent in decoders:
        agent.facts.state = engine_pb2.INSTANCE_STATE_DRAINING
    await wait_until(lambda: not view.ready)
    waiting = asyncio.ensure_future(view.changed())

    decoders[0].facts.state = engine_pb2.INSTANCE_STATE_SERVING
    await asyncio.wait_for(waiting, 10)
    assert view.ready
