"""What a switch between prefill and decode needs beyond SGLang's own (0.5.21)."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

HOST_VARIABLE = "SGLANG_HOST_IP"

_CHECKED_ATTRIBUTE = "kllm_peers_checked"
_CHECK_SECONDS = 0.2
_PROBE_SECONDS = 0.2
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def keep_shared_storage(original: Callable[[Any], None], scheduler: Any) -> None:
    """Drop this instance's own prefix cache; a tier that other instances share is not its to wipe."""
    tree_cache = scheduler.tree_cache
    if tree_cache is None:
        original(scheduler)
        return
    # The original wipes what can be called; the instance's attribute hides the method of its class.
    tree_cache.clear_storage_backend = None
    try:
        original(scheduler)
    finally:
        del tree_cache.clear_storage_backend


def forget_moved_peer(original: Callable[[Any], None], receiver: Any) -> None:
    """A prefill instance that was a decode instance in between listens elsewhere and knows this one no more.

    SGLang keeps a peer's address for as long as its bootstrap server lives, which it does through all roles. The
    question for the KV would go to a closed port and wait there for minutes.
    """
    manager, address = receiver.kv_mgr, receiver.bootstrap_addr
    prefix = f"{address}_"
    with manager.connection_lock:
        known = {key: infos for key, infos in manager.connection_pool.items() if key.startswith(prefix)}
    checked = manager.__dict__.setdefault(_CHECKED_ATTRIBUTE, {})
    now, last = time.monotonic(), checked.get(address)
    if known and (last is None or now - last >= _CHECK_SECONDS):
        checked[address] = now
        peers = {(info["rank_ip"], int(info["rank_port"])) for infos in known.values() for info in infos}
        if any(_refuses(*peer) for peer in peers):
            _forget(receiver, list(known), peers)
    original(receiver)


def misdirected(scheduler: Any, request: Any) -> str:
    """Why a request is not for this instance's present role; empty when it is.

    Who sends it may not know of a switch yet. All requests name the prefill instance by its bootstrap server.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: PLC0415
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    disaggregation = get_disagg()
    role = scheduler.disaggregation_mode.value
    named = request.bootstrap_host
    if not disaggregation.enable_pd_role_switch or named in (None, FAKE_BOOTSTRAP_HOST):
        return ""
    own = (os.environ.get(HOST_VARIABLE), disaggregation.disaggregation_bootstrap_port)
    is_own = (named, request.bootstrap_port) == own
    if is_own == (role == "prefill"):
        return ""
    return f"this is a {role} instance now, the request was meant for another role"


def obstacle(scheduler: Any) -> str:
    """Why this scheduler cannot switch roles; empty when it can."""
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    disaggregation = get_disagg()
    if not disaggregation.enable_pd_role_switch:
        return "it was started for one role"
    role = scheduler.disaggregation_mode.value
    queue = scheduler.disagg_prefill_bootstrap_queue if role == "prefill" else scheduler.disagg_decode_prealloc_queue
    manager = getattr(queue, "kv_manager", None)
    if manager is None or not manager.supports_role_switch:
        return f"transfer backend {disaggregation.disaggregation_transfer_backend} cannot switch roles"
    if getattr(manager, "enable_staging", False):
        return "SGLANG_DISAGG_STAGING_BUFFER is set"
    pool, context = int(scheduler.max_total_num_tokens), int(scheduler.model_config.context_len)
    reserved = int(disaggregation.num_reserved_decode_tokens)
    if context + reserved > pool:
        return f"as a decode instance it would need a KV pool of {context} + {reserved} tokens and has {pool}"
    return ""


def _refuses(host: str, port: int) -> bool:
    """Whether nobody listens there any more; a host that does not answer says nothing."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECONDS) as probe:
            # Leaves no port in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _forget(receiver: Any, keys: list[str], peers: set[tuple[str, int]]) -> None:
    manager = receiver.kv_mgr
    with manager.connection_lock:
        for key in keys:
            manager.connection_pool.pop(key, None)
    for host, port in peers:
        receiver.disconnect_endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
