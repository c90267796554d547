"""Fleets, demands and a small model of a substrate, shared by the tests of the plan."""

from dataclasses import replace

from kllm_core.fleet import EngineLoad, Fleet, Instance, InstanceState
from kllm_core.objectives import Objectives, Role
from kllm_core.steps import Cancel, Drain, Flip, Prepare, Start, StartFrom, Stop
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming
from kllm_operator.plan.demand import Demand, Forecast, Measurement, Stages
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits, Member, PoolLimits

P, D = Role.PREFILL, Role.DECODE
OBJECTIVES = Objectives(ttft_seconds=1.0, tpot_seconds=0.05, percentile=90)
TIMING = EngineTiming(PrefillTiming(a=0.01, b=1e-4, k=0.0), DecodeTiming(a=0.01, b=4e-4, c=0.0))
IDLE = EngineLoad(age_seconds=1.0, running_requests=0, queued_requests=0, queued_uncached_tokens=0, kv_used_tokens=0)
NO_TRAFFIC = Forecast(requests_per_second=0.0)


def limits(budget=None, most=16, least=1, gpus=(1, 1), slots=(0, 0), **kwargs):
    pools = (PoolLimits(least, most, gpu, slot) for gpu, slot in zip(gpus, slots, strict=True))
    return Limits(*pools, budget, **kwargs)


def fleet(prefill=1, decode=1, p_load=IDLE, d_load=IDLE, starting=(0, 0), draining=(0, 0), flippable=False):
    instances = {}
    for role, serving, begun, leaving, load in (
        (P, prefill, starting[0], draining[0], p_load),
        (D, decode, starting[1], draining[1], d_load),
    ):
        states = [InstanceState.SERVING] * serving + [InstanceState.STARTING] * begun
        states += [InstanceState.DRAINING] * leaving
        for number, state in enumerate(states):
            name = f"{role}-{number}"
            told = load if state is InstanceState.SERVING else None
            instances[name] = Instance(name, role, state, load=told, flippable=flippable)
    return Fleet(0.0, instances)


def traffic(rate, uncached=1000.0, output=100.0):
    return Forecast(requests_per_second=rate, uncached_tokens=uncached, cached_tokens=0.0, output_tokens=output)


def model(fleet_, forecast=NO_TRAFFIC, stages=None, changed=None, **kwargs):
    demand = Demand(forecast, stages or Stages(), changed, changed)
    return LoadModel(OBJECTIVES, fleet_, demand, TIMING, **kwargs)


def measured(seconds, oldest=20.0, newest=1.0, samples=50):
    return Measurement(seconds, oldest, newest, samples)


class SmallSubstrate:
    """Carries out steps on a list of members: what starts is Starting and serves when `settle` is called.

    Attributes:
        bad: whether instances that it starts fail instead.
    """

    def __init__(self, members, bad=False):
        self.members = {member.id: member for member in members}
        self.made = 0
        self.bad = bad

    def apply(self, step):
        if isinstance(step, Start):
            self._start(step)
        elif isinstance(step, Prepare):
            self._add(step.role, slot=True)
        elif isinstance(step, Cancel | Stop):
            del self.members[step.instance_id]
        elif isinstance(step, Drain):
            self._put(step.instance_id, state=InstanceState.DRAINING)
        elif isinstance(step, Flip):
            self._put(step.instance_id, state=InstanceState.STARTING, role=step.to, in_flight=0, requested=None)

    def settle(self):
        """What takes time has happened: starts serve, drains are empty, and what was being ended is gone."""
        for member in list(self.members.values()):
            if member.ending:
                del self.members[member.id]
            elif member.state is InstanceState.SERVING:
                self._put(member.id, proven=True)
            elif member.state is InstanceState.STARTING and member.slot:
                self._put(member.id, state=InstanceState.SLOT)
            elif member.state is InstanceState.STARTING and self.bad and member.id.startswith("new-"):
                self._put(member.id, state=InstanceState.FAILED)
            elif member.state is InstanceState.STARTING:
                self._put(member.id, state=InstanceState.SERVING)
            elif member.state is InstanceState.DRAINING:
                self._put(member.id, in_flight=0)

    def serving(self, role):
        serving = [m for m in self.members.values() if m.role is role and m.state is InstanceState.SERVING]
        return [m for m in serving if not m.ending]

    def _put(self, name, **changes):
        self.members[name] = replace(self.members[name], **changes)

    def _start(self, step):
        taken = {StartFrom.GATE: InstanceState.GATED, StartFrom.SLOT: InstanceState.SLOT}.get(step.source)
        if taken is not None:
            able = [m for m in self.members.values() if m.state is taken and not m.unwanted and not m.ending]
            del self.members[min(able, key=lambda m: (m.role is not step.role, m.id)).id]
        self._add(step.role)

    def _add(self, role, slot=False):
        self.made += 1
        name = f"new-{self.made}"
        self.members[name] = Member(
            name, role, InstanceState.STARTING, flippable=True, in_flight=0, slot=slot, proven=False
        )
