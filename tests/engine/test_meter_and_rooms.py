"""Step rates count computing time only; concluded rooms are answered once and forgotten."""

from __future__ import annotations

from types import SimpleNamespace

from kllm_engine.sglang import rooms as rooms_module
from kllm_engine.sglang.meter import StepMeter
from kllm_engine.sglang.rooms import ConcludedRooms


def test_rates_are_over_computing_time():
    meter = StepMeter()
    assert meter.mean_seconds == meter.tokens_per_second == 0.0
    meter.add(100, 0.1)
    meter.add(300, 0.3)
    assert (meter.total_tokens, meter.last_seconds) == (400, 0.3)
    assert abs(meter.tokens_per_second - 1000) < 1e-6
    assert abs(meter.mean_seconds - 0.2) < 1e-9


def test_old_steps_leave_the_window_but_not_the_totals():
    meter = StepMeter()
    meter.add(1, 100.0)
    for _ in range(32):
        meter.add(10, 1.0)
    assert abs(meter.tokens_per_second - 10) < 1e-9
    assert meter.total_seconds == 132.0


class Manager(SimpleNamespace):
    """SGLang's KV manager, as far as rooms need it."""

    def _room_notify_targets(self, room):
        return self.transfer_infos[room]

    def send_kv_status_message(self, **message):
        self.sent.append(message)


def manager(**rooms):
    asked = {int(name[1:]): [target] for name, target in rooms.items()}
    return Manager(transfer_infos=asked, request_status={}, req_to_decode_prefix_len={}, failure_records={}, sent=[])


def test_who_asks_for_a_concluded_room_is_told_once():
    rooms = ConcludedRooms()
    rooms.add(7, "gone")
    kv = manager(r7=("host", 1), r8=("host", 2))
    assert rooms.answer(kv, now=1.0, failed=0) == 1
    assert kv.sent == [{"targets": [("host", 1)], "bootstrap_room": 7, "status": 0, "failure_reason": "gone"}]
    assert list(kv.transfer_infos) == [8]
    assert rooms.answer(kv, now=2.0, failed=0) == 0


def test_a_room_that_is_used_again_is_not_answered():
    rooms = ConcludedRooms()
    rooms.add(7, "gone")
    rooms.forget(7)
    assert rooms.answer(manager(r7=("host", 1)), now=1.0, failed=0) == 0


def test_only_the_newest_rooms_are_kept(monkeypatch):
    monkeypatch.setattr(rooms_module, "_KEPT_ROOMS", 2)
    rooms = ConcludedRooms()
    for room in (1, 2, 3):
        rooms.add(room, "gone")
    kv = manager(r1=("host", 1), r3=("host", 3))
    kv.request_status[1] = 0
    assert rooms.answer(kv, now=1.0, failed=0) == 1
    assert kv.request_status == {}
