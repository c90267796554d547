"""In which state the instance of a pod is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.conditions import Reason
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.substrate.base import Observed
from kllm_operator.substrate.kubernetes_agents import Word
from kllm_operator.substrate.kubernetes_pods import Pod
from kllm_operator.substrate.kubernetes_problems import Problem

_IDLE = frozenset({InstanceState.SLOT, InstanceState.GATED})


@dataclass(frozen=True)
class PodTimeouts:
    """Seconds after which waiting ends.

    Attributes:
        fetching: of a large model over a slow line.
        serving: from the start of the engine's container, or from the start out of a slot, until it serves.
        stop: that a drained instance has for its end.
        gone: that the kubelet has on top of it.
    """

    fetching: float = 6 * 3600.0
    serving: float = 1800.0
    stop: float = 5.0
    gone: float = 120.0


@dataclass(frozen=True)
class Asked:
    """Steps that were asked for and that the pod may not tell of yet.

    Attributes:
        role: that a slot is being given.
        switching: the role that its agent is asked to take.
    """

    ending: bool = False
    draining: bool = False
    role: Role | None = None
    switching: Role | None = None


@dataclass(frozen=True)
class Seen:
    """All that is known of one pod.

    Attributes:
        pool: of which role's pool it is.
        word: what its agent said since it has its role; None when nothing was heard.
        trouble: what events say of a pod that hangs.
    """

    pod: Pod
    pool: Role
    word: Word | None
    asked: Asked
    trouble: Problem | None = None

    def is_made_of(self, pod: Pod, pool: Role, word: Word | None, asked: Asked, trouble: Problem | None) -> bool:
        """Whether exactly these are what is known: not something equal, but for what is asked for."""
        same = self.pod is pod and self.pool is pool and self.word is word and self.trouble is trouble
        return same and self.asked == asked

    @property
    def is_slot(self) -> bool:
        """Whether it has no role, and is not being given one."""
        return self.pod.is_slot and self.asked.role is None

    @property
    def switching(self) -> Role | None:
        """The role that it is about to have."""
        return self.asked.switching or self.pod.switching_to

    @property
    def role(self) -> Role:
        """That of the instance; of a slot, that of its pool."""
        if self.switching is not None:
            return self.switching
        if self.pod.is_slot:
            return self.asked.role or self.pool
        return Role(self.pod.label)

    @property
    def ending(self) -> bool:
        """Whether it is being ended, by whomever."""
        return self.asked.ending or self.pod.deleted_by is not None

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.asked.draining or self.pod.drain_until is not None

    @property
    def serves(self) -> bool:
        """Whether it got to serve in its role. Of one that lost its readiness its agent, once heard, says more."""
        lost = self.pod.was_ready and self.word is None
        return not self.pod.is_slot and (self.pod.ready or lost or self.says(InstanceState.SERVING))

    @property
    def is_failed(self) -> bool:
        """Whether it has ended, or will not get further."""
        return self.pod.problem is not None and self.pod.problem.fatal

    @property
    def settled(self) -> bool:
        """Whether its agent has nothing to tell that is needed here; of one that serves, what its start took."""
        if self.ending or self.draining or self.is_failed or self.switching is not None:
            return True
        return self.says(*_IDLE) if self.is_slot else self.says(InstanceState.SERVING)

    @property
    def hangs(self) -> bool:
        """Whether only events may tell why it gets no further."""
        pod = self.pod
        return pod.placed and not (pod.running_since or pod.fetching_since or pod.problem or self.ending)

    def says(self, *states: InstanceState) -> bool:
        """Whether its agent last told of one of these states."""
        return self.word is not None and self.word.state in states


def observed(seen: Seen, *, now: float, timeouts: PodTimeouts, revision: str, looking_since: float = 0.0) -> Observed:
    """As planner and reconciler see it.

    Args:
        seen: all that is known.
        now: seconds since the epoch.
        timeouts: after which one that does not serve has failed.
        revision: that a start in its role would make.
        looking_since: seconds since the epoch from which on agents were listened to; an earlier silence is nobody's
            fault, and slots tell by their agents only that they are ready.
    """
    pod = seen.pod
    state, message, reason = _state(seen, now, timeouts, looking_since)
    if seen.ending:
        message = "is being ended" if seen.asked.ending else "its pod is being deleted by someone else"
    phases = seen.word.phases if seen.word is not None else ()
    return Observed(
        id=pod.name,
        role=seen.role,
        state=state,
        agent=pod.agent,
        message=message,
        age_seconds=max(0.0, now - pod.began),
        drained=state is InstanceState.DRAINING and pod.drained is True,
        overdue=state is InstanceState.DRAINING and pod.drained is False,
        ending=seen.ending,
        slot=seen.is_slot,
        revision=pod.revision,
        outdated=pod.revision != revision,
        phases=pod.phases + phases,
        # While it switches, what was asked for is being done; anything else waits until it serves again.
        requested=None if seen.ending or seen.switching is not None else pod.requested,
        reason=reason,
        vouched=pod.ready,
        draining_to=pod.draining_to if state is InstanceState.DRAINING else None,
    )


def leaving(pod: Pod, role: Role) -> Observed:
    """A pod that ends with a pool that is gone: it counts for what it holds, whatever its age and state."""
    return Observed(
        id=pod.name,
        role=role,
        state=InstanceState.DRAINING,
        agent=None,
        message="its pool was deleted, and it goes with it",
        age_seconds=0.0,
        ending=True,
        slot=pod.is_slot,
        revision=pod.revision,
    )


def _state(seen: Seen, now: float, timeouts: PodTimeouts, looking_since: float) -> tuple[InstanceState, str, str]:
    """State, message, and the reason if something is wrong."""
    pod = seen.pod
    if pod.problem is not None and pod.problem.fatal:
        return InstanceState.FAILED, pod.problem.message, pod.problem.reason
    if seen.switching is not None:
        return InstanceState.STARTING, "switches its role", ""
    if seen.draining:
        return InstanceState.DRAINING, _drain_words(pod), ""
    if seen.serves:
        return InstanceState.SERVING, "serves", ""
    return _state_of_start(seen, now, timeouts, looking_since)


def _state_of_start(
    seen: Seen, now: float, timeouts: PodTimeouts, looking_since: float
) -> tuple[InstanceState, str, str]:
    pod, word = seen.pod, seen.word
    if seen.is_slot and word is not None and seen.says(*_IDLE):
        return word.state, word.message or "waits for a role", ""
    failure = _late(pod, now, timeouts, looking_since)
    if word is not None and seen.says(InstanceState.FAILED):
        failure = word.message or "its agent gave it up"
    if failure:
        return InstanceState.FAILED, failure, Reason.INSTANCE_FAILING
    problem = pod.problem or seen.trouble
    if problem is not None:
        return InstanceState.STARTING, problem.message, problem.reason
    return InstanceState.STARTING, _progress(pod, word), ""


def _drain_words(pod: Pod) -> str:
    if pod.drained is None:
        return "finishes what it has"
    return "is empty" if pod.drained else "did not get empty in time"


def _late(pod: Pod, now: float, timeouts: PodTimeouts, looking_since: float) -> str:
    if pod.running_since is not None:
        since = max(pod.running_since, pod.began, looking_since)
        return f"is not ready after {timeouts.serving:.0f} s" if now - since > timeouts.serving else ""
    if pod.fetching_since is not None and now - pod.fetching_since > timeouts.fetching:
        return f"its model is not there after {timeouts.fetching:.0f} s"
    return ""


def _progress(pod: Pod, word: Word | None) -> str:
    if word is not None and word.message:
        return word.message
    if pod.running_since is not None:
        return "the agent starts" if word is None else "the engine starts"
    if pod.fetching_since is not None:
        return "the model is made available"
    return "waits for its node" if pod.phases else "waits for a node"
