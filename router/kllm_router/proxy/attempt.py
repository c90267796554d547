"""One try of a request: prefill on P, binding to D, up to the first byte of D's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kllm_core.objectives import Binding
from kllm_router.interfaces import ApiError
from kllm_router.proxy import errors
from kllm_router.proxy.progress import Progress, Stage
from kllm_router.proxy.setback import Setback
from kllm_router.proxy.sides import DecodeSide, PrefillSide, new_room

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint, EngineRequest, FleetView
    from kllm_router.proxy.recovery import Recovery
    from kllm_router.proxy.relay import Relay
    from kllm_router.proxy.upstream import EngineClient
    from kllm_router.settings import Timeouts


class Attempt:
    """One request id on one prefill instance and, as long as its KV can go to any, on decode instances.

    Attributes:
        request: with the id of this attempt.
        prefill: None before it was chosen.
        decode: None before it was chosen.

    Args:
        new_relay: makes the receiver of a decode answer.
        free: aborts a request id on an engine.
    """

    def __init__(
        self,
        request: EngineRequest,
        progress: Progress,
        *,
        fleet: FleetView,
        client: EngineClient,
        new_relay: Callable[[], Relay],
        free: Callable[[Endpoint, str], None],
    ) -> None:
        self.request = request
        self.progress = progress
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self.binding = Binding.LATE
        self._fleet = fleet
        self._client = client
        self._timeouts: Timeouts = client.settings.timeouts
        self._new_relay = new_relay
        self._free = free

    @property
    def pair(self) -> list[Endpoint]:
        """The instances, as far as they were chosen."""
        return [side.endpoint for side in (self.prefill, self.decode) if side is not None]

    async def run(self, recovery: Recovery) -> None:
        """End with the first byte of a stream, or with the whole answer.

        Raises:
            Setback: another attempt may succeed.
            ApiError: none would.
        """
        fleet, request = self._fleet, self.request
        endpoint = await recovery.choose_prefill(request)
        recovery.attempts += 1
        self.binding = fleet.binding(endpoint)
        with fleet.watch(request.rid, endpoint) as watch:
            side = self.prefill = PrefillSide(self._client, endpoint, request, room=new_room(), watch=watch)
            fleet.started(request.rid, endpoint, len(request.input_ids))
            try:
                if self.binding is Binding.EARLY:
                    chosen = await recovery.choose_decode(request, endpoint)
                    self._compute(side)
                    self._bind(side, chosen)
                else:
                    self._compute(side)
                    within = fleet.bind_after(request) if self.binding is Binding.JUST_IN_TIME else None
                    await self._until_parked(side, within=within)
                    self._bind(side, await recovery.choose_decode(request, endpoint))
                await self._until_first(side, recovery)
            finally:
                side.stop_watching()
        fleet.finished(request.rid, endpoint)

    def end(self) -> None:
        """Free both engines of what did not finish."""
        clean = self.decode is not None and self.decode.clean
        self._leave_decode()
        self._new_relay = _no_relay  # the old one holds the exchange, which holds this
        if self.prefill is None:
            return
        self._fleet.finished(self.request.rid, self.prefill.endpoint)
        if clean:
            return
        self.prefill.close()
        if self.prefill.may_run:
            self._free(self.prefill.endpoint, self.request.rid)

    # --- the stages

    def _compute(self, side: PrefillSide) -> None:
        self.progress.enter(Stage.PREFILL)
        side.post(self._fleet)

    async def _until_parked(self, side: PrefillSide, *, within: float | None = None) -> None:
        """P computes; ends when the KV waits for a decode instance, or after so many seconds if that is sooner."""
        if within is not None and within < self._timeouts.prefill:
            try:
                async with asyncio.timeout(within):
                    await self._until_parked(side)
            except TimeoutError:
                return
            return
        try:
            async with asyncio.timeout(self._timeouts.prefill):
                while self.progress.parked_at is None:
                    event = await side.news()
                    if event is not None:
                        self.progress.hear(event)
                        await side.check_event(event, bound=False)
                    elif side.outcome.done():
                        side.check_outcome()
                        self.progress.park()
        except TimeoutError:
            raise errors.timed_out(f"the prompt was not computed within {self._timeouts.prefill:g} seconds") from None

    def _bind(self, side: PrefillSide, endpoint: Endpoint) -> None:
        decode = self.decode = DecodeSide(self._client, endpoint, self.request, body=side.body, relay=self._new_relay())
        self._fleet.started(self.request.rid, endpoint, len(self.request.input_ids))
        self.progress.enter(Stage.HANDSHAKE)
        self.progress.bound_at = time.monotonic()
        side.parked = True  # with the KV on its way, nothing more may be heard of it
        decode.post(self._fleet, self.request.rid)

    async def _until_first(self, side: PrefillSide, recovery: Recovery) -> None:
        """D takes the KV. A D that was never reached leaves it to another one."""
        while self.decode is not None:
            try:
                await self._until_first_of(side, self.decode)
            except Setback as setback:
                if not setback.room_free:
                    raise
                recovery.failed(setback, self.pair)
                self._leave_decode()
                self._bind(side, await recovery.choose_decode(self.request, side.endpoint))
            else:
                return

    async def _until_first_of(self, side: PrefillSide, decode: DecodeSide) -> None:
        relay = decode.relay
        allowed = self._timeouts.first_token if self.request.stream else self._timeouts.total
        if self.progress.parked_at is None:
            allowed += self._timeouts.prefill
        try:
            async with asyncio.timeout(allowed):
                await self._handshake(side, relay)
        except TimeoutError:
            raise decode.late(allowed) from None
        decode.check()
        self.progress.first(relay.first_at)
        self.progress.enter(Stage.STREAMING)

    async def _handshake(self, side: PrefillSide, relay: Relay) -> None:
        while not relay.first.done():
            event = await side.news(relay.first)
            if relay.first.done():
                return
            try:
                if event is not None:
                    self.progress.hear(event)
                    await side.check_event(event, bound=True)
                elif side.outcome.done():
                    side.check_outcome()
            except (ApiError, Setback):
                if side.lost and await self._first_came_anyway(relay):
                    return
                raise

    async def _first_came_anyway(self, relay: Relay) -> bool:
        # A transfer that was complete when P died goes on; how far it was is not known here.
        wait = None if self.progress.stage is Stage.TRANSFER else self._timeouts.prefill_lost
        await asyncio.wait({relay.first}, timeout=wait)
        return relay.first.done()

    # --- the end

    def _leave_decode(self) -> None:
        decode = self.decode
        if decode is None:
            return
        clean = decode.clean
        self._fleet.finished(self.request.rid, decode.endpoint)
        decode.stop_watching()
        if not clean:
            decode.close()
            if decode.may_run:
                self._free(decode.endpoint, self.request.rid)
        decode.relay.detach()


def _no_relay() -> Relay:
    raise RuntimeError("the attempt has ended")
