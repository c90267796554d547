"""What the cluster says of pods that hang before their container runs: a folder, secret or volume that is not there.

It is in events only. For a list the API server looks at all events of the namespace, whatever is asked for: so there is
one for all pods of a service that hang, once one of them has for some seconds, and then less and less often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from kllm_core.conditions import Reason
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import version_of
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.resources import EVENTS
from kllm_operator.substrate.kubernetes_problems import Problem, shortened

_FIRST_SECONDS = 3.0
"""Most pods run by then, and are not asked for."""
_AGAIN_SECONDS = 4.0
"""At least, from one list to the next. A pod that begins to hang meanwhile is asked for within twice as long."""
_LONGEST_SECONDS = 300.0
_PASSES = "cache: timed out waiting for the condition"
"""The kubelet has not read a secret or config map yet, and does it again; of one that is not there it says so."""

_log = structlog.get_logger(__name__)


class PodEvents:
    """Reads warnings about pods of one service. Of each pod that hangs it reads less and less often.

    Args:
        api: the API server.
        namespace: of the pods.
        listener: called after each warning that is news; must not wait or raise.
    """

    def __init__(self, api: KubeApi, *, namespace: str, listener: Callable[[], None]) -> None:
        self._api = api
        self._namespace = namespace
        self._listener = listener
        self._since: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._earliest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._problems: dict[str, Problem] = {}

    def of(self, uid: str) -> Problem | None:
        """What the last warning about a pod says, as long as it is followed."""
        return self._problems.get(uid)

    def follow(self, uids: Collection[str]) -> None:
        """Read of exactly these pods."""
        gone, new = self._due.keys() - set(uids), set(uids) - self._due.keys()
        for uid in gone:
            del self._since[uid], self._due[uid]
            self._problems.pop(uid, None)
        now = asyncio.get_running_loop().time()
        for uid in new:
            self._since[uid], self._due[uid] = now, now + _FIRST_SECONDS
        if gone or new:
            self._arm()

    async def close(self) -> None:
        """Read of none any more."""
        self.follow(())
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A list that is under way is never given up: the API server has done its work for it, and counts an error.
        if self._due and self._reading is None:
            at = max(self._earliest, min(self._due.values()))
            self._timer = asyncio.get_running_loop().call_at(at, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._reading = asyncio.create_task(self._read(), name=f"events of pods in {self._namespace}")

    async def _read(self) -> None:
        try:
            for uid, warning in (await self._warnings(frozenset(self._due))).items():
                self._take(uid, problem_of_event(warning))
        except KubeError as error:
            _log.debug("EventsNotRead", namespace=self._namespace, pods=len(self._due), error=str(error))
        finally:
            self._reading = None
            now = asyncio.get_running_loop().time()
            self._earliest = now + _AGAIN_SECONDS
            for uid, since in self._since.items():
                self._due[uid] = now + min(_LONGEST_SECONDS, max(_AGAIN_SECONDS, now - since))
            self._arm()

    async def _warnings(self, uids: frozenset[str]) -> dict[str, Mapping[str, Any]]:
        """The last warning about each of these pods that has any."""
        # Of a single pod others' warnings, which may be many, need not be sent.
        which = f"regarding.uid={min(uids)}" if len(uids) == 1 else "regarding.kind=Pod"
        last: dict[str, Mapping[str, Any]] = {}
        for event in await self._api.list(EVENTS, namespace=self._namespace, fields=f"{which},type=Warning"):
            uid = str((event.get("regarding") or {}).get("uid"))
            if uid not in uids or _PASSES in str(event.get("note")):
                continue
            if uid not in last or version_of(event) > version_of(last[uid]):
                last[uid] = event
        return last

    def _take(self, uid: str, problem: Problem) -> None:
        if uid in self._due and self._problems.get(uid) != problem:
            self._problems[uid] = problem
            self._listener()


def problem_of_event(event: Mapping[str, Any]) -> Problem:
    """What a warning says. It may pass: whatever is missing may still come."""
    note = shortened(str(event.get("note") or ""))
    is_folder = "hostPath type check failed" in note
    return Problem(Reason.FOLDER_NOT_FOUND if is_folder else Reason.INSTANCE_FAILING, f"{event.get('reason')}: {note}")
