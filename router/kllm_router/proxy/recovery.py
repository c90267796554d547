"""What one request has lost so far, and whether it may try again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kllm_core.objectives import Role
from kllm_router.interfaces import ApiError
from kllm_router.proxy.setback import Cause, Setback

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint, EngineRequest, FleetView
    from kllm_router.metrics import RouterMetrics
    from kllm_router.proxy.waiting_room import WaitingRoom
    from kllm_router.settings import RecoverySettings


class Recovery:
    """Chooses instances for one request, and leaves out those that failed it.

    Whoever has lost an instance when there is no other waits a little: what dies is replaced. A new request that finds
    none waits in the waiting room, where there is one.

    Attributes:
        attempts: pairs that were tried.
        continuations: how often the stream went on elsewhere.

    Args:
        fleet: what to choose from.
        settings: bounds.
        spend: takes one retry from what all requests share; false when none is left.
        metrics: told of the outcome of every retry.
        room: where new requests wait while no instance serves.
    """

    def __init__(
        self,
        fleet: FleetView,
        *,
        settings: RecoverySettings,
        spend: Callable[[], bool],
        metrics: RouterMetrics,
        room: WaitingRoom,
    ) -> None:
        self.attempts = 0
        self.continuations = 0
        self._fleet = fleet
        self._settings = settings
        self._spend = spend
        self._metrics = metrics
        self._room = room
        self._failed: dict[Role, set[str]] = {role: set() for role in Role}
        self._doubted: dict[Role, set[str]] = {role: set() for role in Role}
        self._losses: Counter[Role] = Counter()
        self._prefer = ""
        self._open: Setback | None = None
        self._until: float | None = None
        self._continuing: Cause | None = None

    # --- choices

    async def choose_prefill(self, request: EngineRequest) -> Endpoint:
        """Where to compute the prompt; after a loss of D that is where it was computed before.

        Raises:
            ApiError: nowhere; 503 after a failure.
        """
        prefer = self._prefer

        def choose(excluded: frozenset[str]) -> Endpoint:
            return self._fleet.choose_prefill(request, excluded=excluded, prefer=prefer)

        try:
            endpoint = await self._choose(Role.PREFILL, choose)
        except ApiError as refusal:
            if refusal.status != 503 or self._until is not None or not self._room.open:
                raise
            endpoint = await self._choose_when_started(request, choose, refusal)
        if self._open is not None:
            await self.choose_decode(request, endpoint)  # no prompt is computed again for want of a decode instance
        return endpoint

    async def choose_decode(self, request: EngineRequest, prefill: Endpoint) -> Endpoint:
        """Where to generate; errors as for `choose_prefill`."""
        if self._until is None:
            self._until = asyncio.get_running_loop().time() + self._settings.patience_seconds
        return await self._choose(
            Role.DECODE, lambda excluded: self._fleet.choose_decode(request, prefill, excluded=excluded)
        )

    # --- what happened

    def failed(self, setback: Setback, pair: Sequence[Endpoint]) -> None:
        """An attempt failed before its first byte; returns when there may be another one.

        Args:
            setback: how.
            pair: instances of the attempt, as far as they were chosen.

        Raises:
            ApiError: there may not.
        """
        self._settle("failed_again")
        self._blame(setback, pair)
        self._wait_from(setback)
        role = setback.endpoint.role
        limit = self._settings.prefill_retries if role is Role.PREFILL else self._settings.decode_retries
        self._open = setback
        if self._losses[role] >= limit:
            raise self._ended("exhausted", setback.error)
        if not self._spend():
            raise self._ended("over_budget", setback.error)
        self._losses[role] += 1

    def broke(self, setback: Setback, pair: Sequence[Endpoint], *, resumable: bool) -> None:
        """A stream broke; returns when it may go on elsewhere.

        Raises:
            ApiError: it may not.
        """
        self._settle("failed_again")
        self._blame(setback, pair)
        self._wait_from(setback)
        self._open, self._continuing = setback, setback.cause
        if not resumable:
            raise self._ended("not_resumable", setback.error)
        if self.continuations >= self._settings.continuations:
            raise self._ended("exhausted", setback.error)
        if not self._spend():
            raise self._ended("over_budget", setback.error)
        self.continuations += 1
        self._losses.clear()  # each continuation may be retried as a new request may

    def served(self, pair: Sequence[Endpoint]) -> None:
        """An attempt has come to its first byte."""
        self._settle("served")
        for endpoint in pair:
            self._fleet.judge(endpoint, passed=True)

    # --- inside

    async def _choose(self, role: Role, choose: Callable[[frozenset[str]], Endpoint]) -> Endpoint:
        """Choose now or, as long as there is reason to wait, as soon as an instance comes."""
        try:
            return self._choose_now(role, choose)
        except ApiError as error:
            refusal = error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until):
                while self._until is not None and refusal.status == 503:
                    await self._fleet.changed()
                    try:
                        return self._choose_now(role, choose)
                    except ApiError as error:
                        refusal = error
        raise self._refused(refusal)

    async def _choose_when_started(
        self, request: EngineRequest, choose: Callable[[frozenset[str]], Endpoint], refusal: ApiError
    ) -> Endpoint:
        """Choose as soon as instances serve that have yet to start; the request has been on none."""
        with self._room.place(request, refusal):
            try:
                async with asyncio.timeout(self._room.seconds):
                    while True:
                        await self._fleet.changed()
                        try:
                            return self._choose_now(Role.PREFILL, choose)
                        except ApiError as error:
                            if error.status != 503:
                                raise
                            refusal = error
            except TimeoutError:
                raise self._room.over(refusal) from None

    def _choose_now(self, role: Role, choose: Callable[[frozenset[str]], Endpoint]) -> Endpoint:
        failed = frozenset(self._failed[role])
        doubted = frozenset(self._doubted[role]) - failed
        try:
            return choose(failed | doubted)
        except ApiError as refusal:
            if not doubted or refusal.status != 503:
                raise
        return choose(failed)

    def _refused(self, refusal: ApiError) -> ApiError:
        if self._open is None:
            return refusal
        error = self._open.error
        if refusal.status != 503:
            return self._ended("no_instance", refusal)
        if error.status != 503 and self._open.certain:
            return self._ended("no_instance", error)
        code = error.code if error.status == 503 else refusal.code
        message = f"{error.message}; {refusal.message}"
        told = ApiError(503, message, type=refusal.type, code=code, retry_after=refusal.retry_after)
        return self._ended("no_instance", told)

    def _wait_from(self, setback: Setback) -> None:
        now = asyncio.get_running_loop().time()
        self._until = now - setback.unheard_seconds + self._settings.patience_seconds

    def _blame(self, setback: Setback, pair: Sequence[Endpoint]) -> None:
        failed = setback.endpoint
        self._prefer = ""
        if setback.between:
            for suspect in pair:
                self._doubted[suspect.role].add(suspect.instance_id)
            return
        if setback.certain:
            self._failed[failed.role].add(failed.instance_id)
            self._fleet.judge(failed, passed=False)
        else:
            self._doubted[failed.role].add(failed.instance_id)
        if failed.role is Role.DECODE:
            self._prefer = next((one.instance_id for one in pair if one.role is Role.PREFILL), "")

    def _ended(self, outcome: str, error: ApiError) -> ApiError:
        self._settle(outcome)
        return error

    def _settle(self, outcome: str) -> None:
        """Count the outcome of the last answer to a failure, if there was one."""
        setback, self._open = self._open, None
        if setback is None:
            return
        if self._continuing is not None:
            self._metrics.continued(self._continuing, outcome)
            if outcome != "failed_again":
                self._continuing = None
        else:
            self._metrics.retried(setback.endpoint.role, setback.cause, outcome)
