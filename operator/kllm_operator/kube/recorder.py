"""Events on objects, for people: what has changed and why, each told once in a while."""

from __future__ import annotations

import asyncio
import datetime as dt
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.resources import EVENTS

CONTROLLER = "kllm.io/operator"

_SAME_SECONDS = 120.0
"""In which the same words about the same object are not told again."""
_REMEMBERED = 4096
_MOST_WAITING = 256
"""Events on their way; more than that tell nobody anything."""
_LONGEST_NOTE = 1000

_log = structlog.get_logger(__name__)


class Recorder:
    """Writes events. What cannot be written is logged and dropped: nothing depends on events.

    Args:
        api: fenced.
        instance: of the operator, for the events' reporting instance.
        wall: the time of day.
    """

    def __init__(
        self, api: KubeApi, *, instance: str, wall: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    ) -> None:
        self._api = api
        self._instance = instance
        self._wall = wall
        self._told: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, about: Mapping[str, Any], *, reason: str, note: str, action: str, warning: bool = False) -> None:
        """Tell something of an object; returns at once.

        Args:
            about: the object.
            reason: CamelCase, one of few.
            note: one or two sentences.
            action: CamelCase, what was done or tried.
            warning: whether somebody should look.
        """
        metadata = about["metadata"]
        key = (str(metadata.get("uid")), reason, note)
        now = asyncio.get_running_loop().time()
        if now - self._told.get(key, -_SAME_SECONDS) < _SAME_SECONDS or len(self._tasks) >= _MOST_WAITING:
            return
        self._told[key] = now
        self._told.move_to_end(key)
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        document = self._event(about, reason=reason, note=note, action=action, warning=warning)
        task = asyncio.create_task(self._write(document), name=f"event {reason}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop what is on its way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _event(self, about: Mapping[str, Any], *, reason: str, note: str, action: str, warning: bool) -> dict[str, Any]:
        metadata = about["metadata"]
        at = self._wall().astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        namespace = str(metadata["namespace"])
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"namespace": namespace, "name": f"{metadata['name']}.{secrets.token_hex(8)}"},
            "eventTime": at,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "type": "Warning" if warning else "Normal",
            "note": note if len(note) <= _LONGEST_NOTE else f"{note[: _LONGEST_NOTE - 3]}...",
            "regarding": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": namespace,
                "name": metadata["name"],
                "uid": metadata.get("uid", ""),
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
        }

    async def _write(self, document: Mapping[str, Any]) -> None:
        try:
            await self._api.create(document)
        except KubeError as error:
            _log.warning("EventNotWritten", reason=document["reason"], note=document["note"], error=str(error))
