"""What a view learns of prompts and transfers, and whom it keeps out by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from router_brain.brain_helpers import wait_until
from router_brain.fleet_helpers import follow, heard, request, shown
from router_brain.scripted_agent import ScriptedAgent

from kllm_core.blocks import block_hashes
from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_router.interfaces import ApiError
from kllm_router.proxy.fleet_view import AgentFleetView
from kllm_router.scheduling.admission import AdmissionSettings
from kllm_router.scheduling.slack import SlackSettings


async def test_a_request_that_would_be_late_is_refused_and_one_that_is_in_is_not(
    views: Callable[..., AgentFleetView], agents: list[ScriptedAgent]
):
    for agent in agents[:2]:
        agent.load(queued_uncached_tokens=50_000)
    view = views(admission=AdmissionSettings(slack=SlackSettings(ttft_seconds=1.0)))
    follow(view, agents)
    await wait_until(lambda: view.ready and all(record.taken_at is not None for record in view.book.ordered))

    with pytest.raises(ApiError, match="objective") as refused:
        view.choose_prefill(request(key="someone"))

    assert refused.value.status == 429
    assert refused.value.retry_after >= 1.0
    assert view.choose_prefill(request(key="someone"), excluded=frozenset({"p1"})).instance_id == "p0"


async def test_what_prompts_and_transfers_took_is_learned(view: AgentFleetView, agents: list[ScriptedAgent]):
    for number in range(40):
        sent = request(f"{number:032x}", list(range(number * 5000, number * 5000 + 4000)))
        prefill = view.choose_prefill(sent)
        agent = next(each for each in agents if each.id == prefill.instance_id)
        with view.watch(sent.rid, prefill) as watch:
            view.started(sent.rid, prefill, 4000)
            agent.tell(sent.rid, "PREFILL_DONE", prompt_tokens=4000, cached_tokens=0, prefill_seconds=8.0)
            await heard(watch)
            view.choose_decode(sent, prefill)
            agent.tell(sent.rid, "RELEASED", reason="Transferred")
            await heard(watch)
        view.finished(sent.rid, prefill)

    journeys = view._journeys
    assert journeys.prompts.learner.timing.seconds(4000) == pytest.approx(8.0, rel=0.1)
    assert journeys.transfers._ratios
    assert journeys._handovers == journeys._predicted == {}
    assert not journeys._chains


async def test_a_decode_instance_that_has_the_prefix_needs_less_of_it_moved(
    view: AgentFleetView, agents: list[ScriptedAgent]
):
    ids = list(range(40_000))
    blocks = block_hashes(ids, 4)
    snapshot = engine_pb2.CacheSnapshot(tier=engine_pb2.CACHE_TIER_DEVICE, blocks=blocks, first=True, last=True)
    agents[3].change_cache(engine_pb2.CacheUpdate(sequence=1, snapshot=snapshot))
    await wait_until(lambda: shown(view, "d1")["cached_blocks"] == len(blocks))
    prefill = view.book.records["p0"].endpoint

    assert {view.choose_decode(request(ids=ids), prefill).instance_id for _ in range(4)} == {"d1"}
