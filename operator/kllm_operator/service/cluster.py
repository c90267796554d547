"""What all services of one operator share."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field

from kllm_operator.history.folder import HistoryFolder
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import Key
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.recorder import Recorder
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.metrics import OperatorMetrics
from kllm_operator.render.config import RenderConfig
from kllm_operator.service.standalone import PoolKey
from kllm_operator.service.turns import Turns


@dataclass(frozen=True)
class Cluster:
    """The cluster and the operator's own settings.

    Attributes:
        api: fenced: it refuses writes of a replica that does not lead.
        caches: of all kinds that are watched.
        recorder: for events.
        metrics: of the process.
        render: images, programs and network rules.
        loop: settings of all control loops.
        want: wants a reconcile of a service, or of a standalone pool; must not wait or raise.
        wall: the time of day.
        turns: of all control loops.
        history: where what services' loops decide from is written down; None: nowhere.
    """

    api: KubeApi
    caches: Caches
    recorder: Recorder
    metrics: OperatorMetrics
    render: RenderConfig
    loop: LoopSettings
    want: Callable[[Key | PoolKey], None]
    wall: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    turns: Turns = field(default_factory=Turns)
    history: HistoryFolder | None = None

    def now(self) -> str:
        """The time of day as conditions tell it."""
        return self.wall().astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
