"""Steps last as long as the model says, never less than they take, and late ones are counted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kllm_core.timing import DecodeTiming, PrefillTiming
from kllm_engine.pace import Pace
from kllm_engine.sglang.pacing import Pacer, modelled_seconds

PACE = Pace(PrefillTiming(0.1, 0.001, 1e-6), DecodeTiming(0.02, 0.005, 1e-4))


class Mode(SimpleNamespace):
    """SGLang's ForwardMode, as far as pacing asks."""

    def __getattr__(self, name):
        return lambda: name == f"is_{self.kind}"


def prefill(*requests):
    """A batch of (new, cached) tokens."""
    extend, prefix = zip(*requests, strict=True)
    return SimpleNamespace(forward_mode=Mode(kind="extend"), extend_lens=list(extend), prefix_lens=list(prefix))


def decode(*lengths):
    """A batch of sequences."""
    return SimpleNamespace(forward_mode=Mode(kind="decode"), reqs=[None] * len(lengths), seq_lens_cpu=np.array(lengths))


class Machine:
    """Virtual time."""

    def __init__(self):
        self.now = 100.0
        self.slept = []
        self.pacer = Pacer(PACE, clock=lambda: self.now, sleep=self.sleep)
        self.oversleep = 0.0

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds + self.oversleep

    def step(self, batch, *, takes, after_idle=False):
        """Run one step; its duration."""
        began = self.now

        def compute():
            self.now += takes
            return "result"

        assert self.pacer.step(batch, after_idle=after_idle, compute=compute) == "result"
        return self.now - began


@pytest.mark.parametrize(
    ("batch", "seconds"),
    [
        (prefill((100, 0)), 0.1 + 0.1 + 1e-6 * 100 * 100),
        (prefill((100, 50), (10, 0)), 0.1 + 0.11 + 1e-6 * (100 * 200 + 10 * 10)),
        (decode(30, 70), 0.02 + 0.01 + 1e-4 * 100),
        (SimpleNamespace(forward_mode=Mode(kind="prebuilt")), None),
        (SimpleNamespace(forward_mode=Mode(kind="idle")), None),
    ],
)
def test_the_model_is_that_of_core_over_the_batch(batch, seconds):
    assert modelled_seconds(PACE, batch) == (None if seconds is None else pytest.approx(seconds))


def test_a_kind_of_step_without_a_model_is_left_alone():
    assert modelled_seconds(Pace(decode=PACE.decode), prefill((8, 0))) is None
    assert modelled_seconds(Pace(prefill=PACE.prefill), decode(8)) is None


def test_a_fast_step_waits_for_the_rest_of_its_time():
    machine = Machine()
    assert machine.step(decode(50), takes=0.01) == pytest.approx(0.03)
    assert machine.slept == [pytest.approx(0.02)]
    assert (machine.pacer.tally.steps, machine.pacer.tally.late_steps) == (1, 0)


def test_a_slow_step_is_not_shortened_and_is_counted_as_late():
    machine = Machine()
    assert machine.step(decode(50), takes=0.05) == pytest.approx(0.05)
    assert machine.slept == []
    tally = machine.pacer.tally
    assert (tally.steps, tally.late_steps, tally.late_seconds) == (1, 1, pytest.approx(0.02))


def test_a_step_after_a_late_one_gets_its_whole_time():
    machine = Machine()
    machine.step(decode(50), takes=0.05)
    assert machine.step(decode(50), takes=0.0) == pytest.approx(0.03)


def test_what_lies_between_two_steps_and_oversleeping_do_not_slow_a_busy_engine_down():
    machine = Machine()
    machine.oversleep = 0.004
    began = machine.now
    for _ in range(100):
        machine.step(decode(50), takes=0.01)
        machine.now += 0.002
    assert machine.now - began == pytest.approx(100 * 0.03 + 0.006, abs=1e-6)
    assert machine.pacer.tally.late_steps == 0


def test_time_without_work_is_not_taken_for_a_part_of_the_next_step():
    machine = Machine()
    machine.step(decode(50), takes=0.01)
    machine.now += 60
    assert machine.step(decode(50), takes=0.01, after_idle=True) == pytest.approx(0.03)
