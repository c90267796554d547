"""What the cluster says of pods that hang before their container runs: a folder, secret or volume that is not there.

It is in events only, which are read of such pods and of no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from kllm_core.conditions import Reason
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import version_of
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.resources import EVENTS
from kllm_operator.substrate.kubernetes_problems import Problem, shortened

_FIRST_SECONDS = 2.0
"""Most pods run by then, and are not asked for."""
_LONGEST_SECONDS = 300.0
_PASSES = "cache: timed out waiting for the condition"
"""The kubelet has not read a secret or config map yet, and does it again; of one that is not there it says so."""

_log = structlog.get_logger(__name__)


class PodEvents:
    """Reads warnings about pods, less and less often.

    Args:
        api: the API server.
        listener: called after each that is news; must not wait or raise.
    """

    def __init__(self, api: KubeApi, *, listener: Callable[[], None]) -> None:
        self._api = api
        self._listener = listener
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, Problem] = {}

    def of(self, uid: str) -> Problem | None:
        """What the last warning about a pod says, as long as it is followed."""
        return self._problems.get(uid)

    def follow(self, namespaces: Mapping[str, str]) -> None:
        """Read of exactly these pods: their namespaces by uid."""
        for uid in self._tasks.keys() - namespaces.keys():
            self._tasks.pop(uid).cancel()
            self._problems.pop(uid, None)
        for uid in namespaces.keys() - self._tasks.keys():
            self._tasks[uid] = asyncio.create_task(self._run(uid, namespaces[uid]), name=f"events of pod {uid}")

    async def close(self) -> None:
        """Read of none any more."""
        tasks = list(self._tasks.values())
        self.follow({})
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, uid: str, namespace: str) -> None:
        pause = _FIRST_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_SECONDS, 2 * pause)
            try:
                warnings = await self._api.list(EVENTS, namespace=namespace, fields=f"regarding.uid={uid},type=Warning")
            except KubeError as error:
                _log.debug("EventsNotRead", pod=uid, error=str(error))
                continue
            warnings = [each for each in warnings if _PASSES not in str(each.get("note"))]
            if warnings:
                self._take(uid, problem_of_event(max(warnings, key=version_of)))

    def _take(self, uid: str, problem: Problem) -> None:
        if self._problems.get(uid) != problem:
            self._problems[uid] = problem
            self._listener()


def problem_of_event(event: Mapping[str, Any]) -> Problem:
    """What a warning says. It may pass: whatever is missing may still come."""
    note = shortened(str(event.get("note") or ""))
    is_folder = "hostPath type check failed" in note
    return Problem(Reason.FOLDER_NOT_FOUND if is_folder else Reason.INSTANCE_FAILING, f"{event.get('reason')}: {note}")
