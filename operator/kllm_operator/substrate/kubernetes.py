"""Instances as pods.

All that a step must not lose is on the pods, so that a new leader goes on with what it finds:

- A drain: `drain-until` is written, the agent drains, `drained` is written. Without the last word of the three a new
  leader asks the agent again, which tells at once what became of it. With `draining-to` the plan was to flip it then.
- A flip: `switching-to` is written, the agent switches, then label, owner and the end of the drain are written in one
  patch. With `switching-to` a new leader asks the agent for that role again: it has it already, or takes it now, or
  refuses and stays drained in its old role.
- A start from a slot: role and owner are written in one patch, then the agent is asked. A pod that has a role and whose
  agent says that it is a slot is asked again.
- An end is a deletion with the pod's uid, which the API server keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import ObjectCache
from kllm_operator.substrate import agentcalls
from kllm_operator.substrate import kubernetes_patches as patches
from kllm_operator.substrate.base import Observed, Substrate
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError
from kllm_operator.substrate.kubernetes_agents import AgentWords, Word
from kllm_operator.substrate.kubernetes_events import PodEvents
from kllm_operator.substrate.kubernetes_pods import Pod
from kllm_operator.substrate.kubernetes_states import Asked, PodTimeouts, Seen, leaving, observed
from kllm_operator.substrate.kubernetes_store import OwnPods, PodGoneError, PodPlan
from kllm_operator.substrate.ongoing import Ongoing

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""As the API server's own suffixes: no vowels, so no words, and nothing that looks like another."""
_AT_ONCE_SECONDS = 1.0
"""Grace of an instance that holds nothing. A grace of 0 would be a deletion that the kubelet does not confirm."""
_PAUSE_SECONDS = 1.0
"""Between two tries of what must not be lost."""
_GATHER_SECONDS = 0.05
"""News of many pods come together, and each look is at all of them."""
_LEAST_DRAIN_SECONDS = 0.6
"""An agent takes half a second to be sure that it is empty, however late it is asked."""
_UNBEGUN = frozenset({InstanceState.STARTING, InstanceState.FAILED, InstanceState.SLOT, InstanceState.GATED})
_IDLE = frozenset({InstanceState.SLOT, InstanceState.GATED})
_FRESH_SECONDS = 1.0
"""For which what was made of a pod holds while nothing of it has changed: only that it is late comes with time."""

_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


def _suffix() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(5))


@dataclass(frozen=True)
class _Made:
    """What was made of one pod.

    Attributes:
        revision: that a start in its role would have made.
        at: when; seconds since the epoch.
        observed: but for its age.
    """

    seen: Seen
    revision: str
    at: float
    observed: Observed


class PodSubstrate(Substrate):
    """One service's pods. It touches none that the service's pools do not control.

    Args:
        plan: what pods are made from.
        api: the API server.
        pods: as the watch tells of them; `notice` is to be called after each change.
        token: fleet token.
        timeouts: of everything that waits.
        clock: seconds since the epoch, as pods carry times over restarts.
        suffix: makes the last part of a pod's name.

    Raises:
        TemplateError: a pod template cannot be used.
    """

    def __init__(
        self,
        plan: PodPlan,
        *,
        api: KubeApi,
        pods: ObjectCache,
        token: str,
        timeouts: PodTimeouts | None = None,
        clock: Callable[[], float] = time.time,
        suffix: Callable[[], str] = _suffix,
    ) -> None:
        super().__init__()
        self._own = OwnPods(plan, api=api, cache=pods, suffix=suffix)
        self._token = token
        self._timeouts = timeouts or PodTimeouts()
        self._clock = clock
        self._looking_since = clock()
        self._words = AgentWords(token, listener=self._look_soon)
        self._events = PodEvents(api, namespace=plan.service.metadata.namespace, listener=self._look_soon)
        self._ongoing = Ongoing(self._look)
        self._targets: dict[str, Role] = {}
        self._told: list[Observed] = []
        self._made: dict[str, _Made] = {}
        self._soon: asyncio.TimerHandle | None = None
        self._closed = False

    def use(self, plan: PodPlan) -> None:
        """Make pods from another plan from now on; those that are there may be outdated then.

        Raises:
            TemplateError: a pod template cannot be used; nothing has changed then.
        """
        self._own.use(plan)
        self._look()

    def notice(self) -> None:
        """To be called after each change of the service's pods. Goes on with steps that another leader has begun."""
        self._own.notice()
        self._look_soon()

    async def close(self) -> None:
        """Wait for nothing any more. Pods go on with what they were asked for."""
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()
        await self._ongoing.end()
        await self._words.close()
        await self._events.close()

    def revision(self, role: Role) -> str:
        """See `Substrate.revision`."""
        return self._own.revision(role)

    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        """See `Substrate.start`."""
        if source is StartFrom.NEW:
            return await self._created(role, slot=False)
        for seen in self._slots(role):
            try:
                return await self._adopted(seen.pod, role)
            except PodGoneError:
                continue
        raise StepRefusedError("NoSlot", f"there is no slot for one more {role} instance")

    async def add_slot(self, role: Role) -> str:
        """See `Substrate.add_slot`."""
        return await self._created(role, slot=True)

    async def cancel(self, instance_id: str) -> None:
        """See `Substrate.cancel`."""
        seen = self._known(instance_id)
        if seen is None:
            return
        state = self._observed(seen).state
        if state not in _UNBEGUN:
            raise StepRefusedError("AlreadyServing", f"{instance_id} is {state}; drain and stop it instead")
        await self._end(seen.pod, _AT_ONCE_SECONDS)

    async def drain(self, instance_id: str, *, deadline_seconds: float, to: Role | None = None) -> bool:
        """See `Substrate.drain`."""
        seen = self._get(instance_id)
        state = self._observed(seen).state
        if state not in {InstanceState.SERVING, InstanceState.DRAINING} or seen.ending:
            raise StepRefusedError("NotServing", f"{instance_id} is {state}, so there is nothing to drain")
        until = self._clock() + deadline_seconds
        return bool(await self._ongoing.join("drain", instance_id, lambda: self._drain(seen.pod, until, to)))

    async def stop(self, instance_id: str) -> None:
        """See `Substrate.stop`."""
        seen = self._known(instance_id)
        if seen is not None:
            await self._end(seen.pod, self._timeouts.stop)

    async def flip(self, instance_id: str, to: Role) -> float:
        """See `Substrate.flip`."""
        seen = self._get(instance_id)
        now = self._observed(seen)
        if now.role is to and now.state is InstanceState.SERVING:
            return 0.0
        if not self._ongoing.has("flip", instance_id):
            if not now.drained or now.ending:
                raise StepRefusedError("NotDrained", f"{instance_id} is {now.state}; drain it before its role changes")
            if self.revision(to) != seen.pod.revision:
                raise StepRefusedError("CannotFlip", f"{to} instances are made from another pod than {instance_id}")
            self._own.owner(to)
            self._targets[instance_id] = to
        return float(await self._ongoing.join("flip", instance_id, lambda: self._flip(seen.pod, to)))

    async def dismiss(self, instance_id: str) -> None:
        """See `Substrate.dismiss`."""
        seen = self._known(instance_id)
        if seen is not None:
            with contextlib.suppress(PodGoneError):
                await self._own.change(seen.pod, patches.dismissed)
            self._look()

    async def observe(self) -> Sequence[Observed]:
        """See `Substrate.observe`."""
        return self._look()

    async def _created(self, role: Role, *, slot: bool) -> str:
        pod: Pod = await self._ongoing.join("create", secrets.token_hex(8), lambda: self._own.create(role, slot=slot))
        return pod.name

    async def _adopted(self, pod: Pod, role: Role) -> str:
        self._targets[pod.name] = role
        return str(await self._ongoing.join("adopt", pod.name, lambda: self._adopt(pod, role)))

    async def _adopt(self, pod: Pod, role: Role) -> str:
        """Give a slot its role, and have its agent asked; that may take its time."""
        owner, now = self._own.owner(role), self._clock()
        self._words.forget(pod.uid)
        pod = await self._own.change(pod, lambda fresh: patches.assumed(fresh, role, owner, now=now))
        self._ongoing.begin("assume", pod.name, lambda: self._assume(pod, role))
        return pod.name

    async def _assume(self, pod: Pod, role: Role) -> None:
        """Ask its agent until that has an answer."""
        while (now := self._own.now(pod)) is not None and now.deleted_by is None and now.agent is not None:
            try:
                await agentcalls.assume(now.agent, self._token, role)
            except StepRefusedError as error:
                self._words.say(pod.uid, Word(InstanceState.FAILED, role, str(error)))
                return
            except SubstrateError as error:
                _log.warning("SlotNotAsked", instance=pod.name, role=role, error=str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._words.forget(pod.uid)
            return

    async def _drain(self, pod: Pod, until: float, to: Role | None) -> bool:
        pod = await self._own.change(pod, lambda fresh: patches.draining(fresh, until, to))
        self._look()
        try:
            empty = await self._emptied(pod, until)
        except SubstrateError:
            await self._own.change_at_last(pod, lambda fresh: patches.drain_ended(fresh, empty=False))
            raise
        await self._own.change_at_last(pod, lambda fresh: patches.drain_ended(fresh, empty=empty))
        return empty

    async def _emptied(self, pod: Pod, until: float) -> bool:
        """Have its agent drain it. One that cannot be reached is asked again, since what it holds would be lost."""
        while True:
            left = max(_LEAST_DRAIN_SECONDS, until - self._clock())
            try:
                return await agentcalls.drain(_agent_of(pod), self._token, deadline_seconds=left)
            except SubstrateError as error:
                now = self._own.now(pod)
                if now is None or now.agent is None or self._clock() + _PAUSE_SECONDS > until:
                    raise
                _log.warning("DrainNotHeard", instance=pod.name, error=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _flip(self, pod: Pod, to: Role) -> float:
        pod = await self._own.change(pod, lambda fresh: patches.switching(fresh, to))
        try:
            seconds = await agentcalls.switch_role(_agent_of(pod), self._token, to)
        except SubstrateError:
            await self._own.change_at_last(pod, patches.not_switched)
            raise
        self._words.say(pod.uid, Word(InstanceState.SERVING, to))
        await self._own.change_at_last(pod, lambda fresh: patches.switched(fresh, to, self._own.owner(to)))
        return seconds

    async def _end(self, pod: Pod, grace_seconds: float) -> None:
        gone = self._timeouts.gone
        await self._ongoing.join(
            "end", pod.name, lambda: self._own.end(pod, grace_seconds=grace_seconds, timeout_seconds=gone)
        )

    async def _resumed(self, pod: Pod, work: Coroutine[Any, Any, _Result]) -> _Result:
        """A step that another leader began, or whose end could not be written; tried again as long as it fails."""
        try:
            return await work
        except SubstrateError as error:
            _log.warning("StepNotResumed", instance=pod.name, error=str(error))
            now = self._own.now(pod)
            if now is not None and (now.switching_to is not None or now.drains):
                await asyncio.sleep(_PAUSE_SECONDS)
            raise

    def _look_soon(self) -> None:
        """Look once for all that comes at about the same time."""
        if self._soon is None and not self._closed:
            self._soon = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._look)

    def _look(self) -> list[Observed]:
        """After anything that may change what is told: listen to those who start, go on with what was begun, tell."""
        if self._closed:
            return self._in_order(self._all())
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        seen = self._all()
        self._targets = {name: role for name, role in self._targets.items() if name in seen}
        self._words.keep(frozenset(each.pod.uid for each in seen.values()))
        unsettled = {each.pod.uid: each.pod.agent for each in seen.values() if not each.settled}
        self._words.follow({uid: agent for uid, agent in unsettled.items() if agent is not None})
        self._events.follow({each.pod.uid for each in seen.values() if each.hangs})
        for each in seen.values():
            self._go_on(each)
        now, there = self._clock(), self._all()
        # Ages are no news.
        told = [*(self._ageless(each, now) for each in there.values()), *self._leaving()]
        self._made = {name: made for name, made in self._made.items() if name in there}
        if told != self._told:
            self._told = told
            self._changed()
        return self._in_order(there)

    def _go_on(self, seen: Seen) -> None:
        pod, name = seen.pod, seen.pod.name
        if seen.ending or seen.is_failed:
            return
        if (to := pod.switching_to) is not None:
            self._targets[name] = to
            self._ongoing.begin("flip", name, lambda: self._resumed(pod, self._flip(pod, to)))
        elif (until := pod.drain_until) is not None and pod.drains:
            self._ongoing.begin("drain", name, lambda: self._resumed(pod, self._drain(pod, until, pod.draining_to)))
        elif not pod.is_slot and seen.says(*_IDLE):
            self._ongoing.begin("assume", name, lambda: self._assume(pod, Role(pod.label)))

    def _in_order(self, own: Mapping[str, Seen]) -> list[Observed]:
        return sorted((*map(self._observed, own.values()), *self._leaving()), key=lambda each: each.id)

    def _leaving(self) -> list[Observed]:
        return [leaving(pod, role) for pod, role in self._own.leaving()]

    def _slots(self, role: Role) -> list[Seen]:
        """Slots that can become an instance of a role: its own pool's first, the oldest first."""
        able = [
            seen
            for seen in self._all().values()
            if seen.is_slot and not seen.ending and seen.pod.revision == self.revision(role)
            and self._observed(seen).state in _IDLE
        ]  # fmt: skip
        return sorted(able, key=lambda seen: (seen.pool is not role, seen.pod.began, seen.pod.name))

    def _all(self) -> dict[str, Seen]:
        return {name: self._seen(pod) for name, pod in self._own.all().items()}

    def _seen(self, pod: Pod) -> Seen:
        def asked(what: str) -> bool:
            return self._ongoing.has(what, pod.name)

        target = self._targets.get(pod.name)
        steps = Asked(
            ending=asked("end"),
            draining=asked("drain"),
            role=target if asked("adopt") else None,
            switching=target if asked("flip") else None,
        )
        pool, word, trouble = self._own.pool(pod), self._words.of(pod.uid), self._events.of(pod.uid)
        made = self._made.get(pod.name)
        if made is not None and made.seen.is_made_of(pod, pool, word, steps, trouble):
            return made.seen
        return Seen(pod, pool, word, steps, trouble)

    def _observed(self, seen: Seen) -> Observed:
        now = self._clock()
        return replace(self._ageless(seen, now), age_seconds=max(0.0, now - seen.pod.began))

    def _ageless(self, seen: Seen, now: float) -> Observed:
        """What is told of a pod but its age. Most of thousands have not changed since it was asked last."""
        made, revision = self._made.get(seen.pod.name), self._own.revision(seen.role)
        if made is None or made.seen is not seen or made.revision != revision or now - made.at > _FRESH_SECONDS:
            told = observed(
                seen, now=now, timeouts=self._timeouts, revision=revision, looking_since=self._looking_since
            )
            made = self._made[seen.pod.name] = _Made(seen, revision, now, replace(told, age_seconds=0.0))
        return made.observed

    def _get(self, instance_id: str) -> Seen:
        try:
            return self._all()[instance_id]
        except KeyError:
            raise StepRefusedError("NoSuchInstance", f"there is no instance {instance_id!r}") from None

    def _known(self, instance_id: str) -> Seen | None:
        """The instance, or None for one that is gone.

        Raises:
            StepRefusedError: there never was one of that id.
        """
        is_ours = re.fullmatch(re.escape(self._own.prefix) + "[a-z0-9]+", instance_id) is not None
        return self._all().get(instance_id) if is_ours else self._get(instance_id)


def _agent_of(pod: Pod) -> str:
    if pod.agent is None:
        raise SubstrateError(f"the engine's container of pod {pod.name} does not run")
    return pod.agent
