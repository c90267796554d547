"""A switch of roles wipes nothing that is shared, finds peers that moved, and refuses requests for the role before."""

from __future__ import annotations

import socket
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from kllm_engine.sglang import flip


class TreeCache:
    """SGLang's, as far as a switch uses it."""

    def __init__(self):
        self.wiped = 0

    def clear_storage_backend(self):
        self.wiped += 1


def sglang_release(scheduler):
    """What SGLang does with the cache."""
    wipe = getattr(scheduler.tree_cache, "clear_storage_backend", None)
    if callable(wipe):
        wipe()


def test_shared_storage_is_not_wiped_by_a_switch_and_can_be_wiped_afterwards():
    cache = TreeCache()
    flip.keep_shared_storage(sglang_release, SimpleNamespace(tree_cache=cache))
    assert cache.wiped == 0
    cache.clear_storage_backend()
    assert cache.wiped == 1


def test_shared_storage_can_be_wiped_after_a_switch_that_failed():
    cache = TreeCache()

    def fail(_):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        flip.keep_shared_storage(fail, SimpleNamespace(tree_cache=cache))
    cache.clear_storage_backend()
    assert cache.wiped == 1


class Receiver(SimpleNamespace):
    """SGLang's receiver of KV, as far as peers are concerned."""

    def disconnect_endpoint(self, endpoint):
        self.disconnected.append(endpoint)


def receiver(**peers):
    """One that asks the first of these peers (name=port)."""
    pool = {f"{name}:1_0_0_0": [{"rank_ip": "127.0.0.1", "rank_port": str(port)}] for name, port in peers.items()}
    manager = SimpleNamespace(connection_lock=threading.Lock(), connection_pool=pool)
    return Receiver(kv_mgr=manager, bootstrap_addr=f"{next(iter(peers))}:1", disconnected=[])


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_peer_that_listens_is_kept(listener):
    asker = receiver(a=listener)
    flip.forget_moved_peer(lambda _: None, asker)
    assert list(asker.kv_mgr.connection_pool) == ["a:1_0_0_0"]
    assert asker.disconnected == []


def test_a_peer_that_has_moved_is_forgotten_before_it_is_asked_and_no_other_is(closed):
    asker = receiver(a=closed, b=closed)
    seen = []
    flip.forget_moved_peer(lambda asked: seen.append(list(asked.kv_mgr.connection_pool)), asker)
    assert seen == [["b:1_0_0_0"]]
    assert asker.disconnected == [f"tcp://127.0.0.1:{closed}"]


@pytest.mark.parametrize("binade", range(4, 24))
def test_a_peer_is_probed_at_the_first_request_however_long_the_machine_runs(closed, monkeypatch, binade):
    monkeypatch.setattr(flip.time, "monotonic", lambda: 1.3 * 2**binade)
    asker = receiver(a=closed)
    flip.forget_moved_peer(lambda _: None, asker)
    assert not asker.kv_mgr.connection_pool


def test_peers_are_not_probed_with_every_request(closed, monkeypatch):
    probes = []
    monkeypatch.setattr(flip, "_refuses", lambda *peer: probes.append(peer))
    asker = receiver(a=closed)
    for now in (100.0, 100.1, 100.19, 100.21):
        monkeypatch.setattr(flip.time, "monotonic", lambda now=now: now)
        flip.forget_moved_peer(lambda _: None, asker)
    assert len(probes) == 2


@pytest.fixture
def disaggregation(monkeypatch):
    """SGLang's settings, changeable."""
    settings = SimpleNamespace(
        enable_pd_role_switch=True,
        disaggregation_bootstrap_port=7000,
        disaggregation_transfer_backend="mooncake",
        num_reserved_decode_tokens=512,
    )
    context, utils = ModuleType("runtime_context"), ModuleType("utils")
    context.get_disagg = lambda: settings
    utils.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", utils)
    monkeypatch.setenv(flip.HOST_VARIABLE, "10.0.0.1")
    return settings


def scheduler(role, **changes):
    manager = SimpleNamespace(supports_role_switch=True)
    queue = SimpleNamespace(kv_manager=manager)
    fields = {
        "disaggregation_mode": SimpleNamespace(value=role),
        "disagg_prefill_bootstrap_queue": queue if role == "prefill" else None,
        "disagg_decode_prealloc_queue": queue if role == "decode" else None,
        "max_total_num_tokens": 9000,
        "model_config": SimpleNamespace(context_len=8192),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("role", "host", "port", "right"),
    [
        ("prefill", "10.0.0.1", 7000, True),
        ("prefill", "10.0.0.2", 7000, False),
        ("prefill", "10.0.0.1", 7001, False),
        ("decode", "10.0.0.1", 7000, False),
        ("decode", "10.0.0.2", 7000, True),
        ("prefill", "2.2.2.2", 7000, True),
        ("decode", "2.2.2.2", 7000, True),
        ("prefill", None, 7000, True),
    ],
)
def test_a_request_is_for_the_role_that_its_bootstrap_server_implies(disaggregation, role, host, port, right):
    reason = flip.misdirected(scheduler(role), SimpleNamespace(bootstrap_host=host, bootstrap_port=port))
    assert (reason == "") is right
    assert right or f"{role} instance now" in reason


def test_an_engine_that_keeps_its_role_takes_every_request(disaggregation):
    disaggregation.enable_pd_role_switch = False
    assert flip.misdirected(scheduler("decode"), SimpleNamespace(bootstrap_host="10.0.0.1", bootstrap_port=7000)) == ""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_obstacles_are_named(disaggregation, role):
    assert flip.obstacle(scheduler(role)) == ""
    assert "8192 + 512 tokens and has 8703" in flip.obstacle(scheduler(role, max_total_num_tokens=8703))
    other = SimpleNamespace(kv_manager=SimpleNamespace(supports_role_switch=False))
    changes = {"disagg_prefill_bootstrap_queue": other, "disagg_decode_prealloc_queue": other}
    assert "mooncake cannot" in flip.obstacle(scheduler(role, **changes))
    disaggregation.enable_pd_role_switch = False
    assert "one role" in flip.obstacle(scheduler(role))
