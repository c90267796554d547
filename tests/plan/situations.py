"""Any state of two pools and any goal, what every step from there must keep, and where it must come to rest."""

from dataclasses import replace

from hypothesis import strategies as st
from plan.plan_helpers import D, P, SmallSubstrate, limits

from kllm_core.fleet import InstanceState
from kllm_core.steps import Cancel, DesiredCounts, Drain, Flip, Prepare, Request, Start, StartFrom
from kllm_operator.plan.invariants import breach
from kllm_operator.plan.members import Goal, Limits, Member, PoolLimits
from kllm_operator.plan.reconciler import next_step

SERVING, STARTING, DRAINING = InstanceState.SERVING, InstanceState.STARTING, InstanceState.DRAINING
SLOT, GATED, FAILED = InstanceState.SLOT, InstanceState.GATED, InstanceState.FAILED
_RESTS = {"Converged", "BudgetExhausted", "NoRoomForSlots", "RolloutStopped"}


def goal(prefill=1, decode=1, flip_to=None, **kwargs):
    return Goal(DesiredCounts(prefill, decode, "Test", "a test"), limits(**kwargs), flip_to)


def pair(*more):
    return [Member("p0", P, SERVING, age_seconds=100), Member("d0", D, SERVING, age_seconds=100), *more]


def step(wanted, members):
    return next_step(wanted, members).step


def held(bounds, members):
    return sum(bounds.of(member.role).gpus for member in members)


@st.composite
def situations(draw, unwanted=True):
    """A goal and members; with `unwanted` some of them are outdated or asked to leave, and there are slots."""
    gpus = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 4), (0, 0)]))
    least = [draw(st.integers(0, 2)) for _ in range(2)]
    slots = [draw(st.integers(0, 2)) if unwanted else 0 for _ in range(2)]
    pools = [
        PoolLimits(low, low + draw(st.integers(0, 4)), gpu, slot)
        for low, gpu, slot in zip(least, gpus, slots, strict=True)
    ]
    needed = sum(pool.min_replicas * pool.gpus for pool in pools)
    bounds = Limits(
        *pools, draw(st.none() | st.integers(needed, needed + 8)), surge=draw(st.integers(0, 2)) if unwanted else 1,
        max_unavailable=draw(st.integers(0, 1)) if unwanted else 0, interchangeable=draw(st.booleans()),
    )  # fmt: skip
    desired = [draw(st.integers(pool.min_replicas, pool.max_replicas)) for pool in pools]
    while not bounds.fits(bounds.gpus(*desired)):
        able = [i for i in range(2) if desired[i] > pools[i].min_replicas and pools[i].gpus]
        desired[able[0]] -= 1
    some = st.booleans() if unwanted else st.just(False)
    member = st.builds(
        Member, st.just(""), st.sampled_from([P, D]), st.sampled_from(list(InstanceState)), flippable=st.booleans(),
        in_flight=st.none() | st.integers(0, 3), age_seconds=st.floats(0, 100), drain_overdue=st.booleans(),
        ending=st.booleans(), slot=some, outdated=some, proven=some,
        requested=st.none() | st.sampled_from(list(Request)) if unwanted else st.none(),
    )  # fmt: skip
    named = [replace(m, id=f"m{n}") for n, m in enumerate(draw(st.lists(member, max_size=9)))]
    return Goal(DesiredCounts(*desired, "Any", "any"), bounds, draw(st.none() | st.sampled_from([P, D]))), named


def run(wanted, members, promise=lambda *_: None, most=200):
    """Apply steps until nothing is left to do; what takes time happens whenever there is no step."""
    small, prefixes = SmallSubstrate(members), [list(members)]
    for _ in range(most):
        before = list(small.members.values())
        decision = next_step(wanted, before)
        if decision.step is None:
            small.settle()
            if list(small.members.values()) == before:
                assert decision.reason in _RESTS, decision
                return small, prefixes
            continue
        small.apply(decision.step)
        after = list(small.members.values())
        promise(wanted, decision, before, after)
        prefixes.append(after)
    raise AssertionError(f"no rest within {most} steps")


def coming(role, members):
    there = [m for m in members if m.role is role and m.state in (SERVING, STARTING)]
    return [m for m in there if not m.ending and not m.is_idle]


def serves(role, members):
    return [m for m in members if m.role is role and m.state is SERVING and not m.ending]


def promises(wanted, decision, before, after):
    """Independent of the room's own check: what an interruption right here must leave intact."""
    bounds, step_ = wanted.limits, decision.step
    assert held(bounds, after) <= held(bounds, before) or bounds.fits(held(bounds, after))
    assert breach(step_, wanted, before) is None
    if isinstance(step_, Start | Prepare):
        _adds(wanted, step_, before, after)
        return
    member = next(m for m in before if m.id == step_.instance_id)
    assert not member.ending
    if isinstance(step_, Drain):
        _drains(wanted, decision.reason, member, after)
    if isinstance(step_, Cancel):
        assert member.state is not SERVING
    if isinstance(step_, Flip):
        assert member.in_flight == 0
        assert not member.unwanted
        assert bounds.alike
        assert len(coming(step_.to, after)) <= wanted.wanted(step_.to)


def _adds(wanted, step_, before, after):
    bounds, role = wanted.limits, step_.role
    if isinstance(step_, Prepare):
        assert sum(m.is_idle and m.role is role and not m.ending for m in after) <= bounds.of(role).slots
        return
    replaced = [m for m in serves(role, before) if m.unwanted]
    assert len(coming(role, after)) <= wanted.wanted(role) + (bounds.surge if replaced else 0)
    fresh = [m for m in coming(role, before) if not m.outdated]
    if any(m.outdated for m in replaced) and not any(m.proven and m.state is SERVING for m in fresh):
        assert not fresh
    if step_.source is StartFrom.SLOT and not bounds.alike:
        assert any(m.state is SLOT and m.role is role and not m.unwanted for m in before)


def _drains(wanted, reason, member, after):
    role, left = member.role, serves(member.role, after)
    spared = wanted.limits.max_unavailable if member.unwanted else 0
    assert len(left) >= wanted.limits.of(role).min_replicas - spared
    assert left or spared or wanted.wanted(role) == 0
    if reason != "DrainToReplace":
        assert len(left) >= wanted.wanted(role)


def assert_converged(wanted, small):
    bounds, members = wanted.limits, list(small.members.values())
    stuck = [m for m in members if m.unwanted]
    for role in (P, D):
        assert len(small.serving(role)) == wanted.wanted(role)
        slots = sum(m.is_idle and m.role is role for m in members)
        assert slots <= bounds.of(role).slots
        room = bounds.fits(held(bounds, members) + bounds.of(role).gpus)
        assert slots == bounds.of(role).slots or not room or stuck
    assert all(m.state in (SERVING, SLOT, GATED) for m in members)
    assert bounds.fits(held(bounds, members))
    if stuck:
        assert any(_is_stuck(wanted, each, members) for each in stuck)


def _is_stuck(wanted, member, members):
    bounds = wanted.limits
    room = bounds.surge and bounds.fits(held(bounds, members) + bounds.of(member.role).gpus)
    slots = bounds.surge and any(m.is_idle for m in members)
    spare = wanted.wanted(member.role) > wanted.least(member)
    return member.state is SERVING and not room and not slots and not spare
