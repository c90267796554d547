"""Answers decode instances that ask for KV which this prefill instance has given up.

SGLang (0.5.21) files such a question as a new transfer and never answers: the decode instance would wait for minutes.
"""

from __future__ import annotations

from typing import Any

_KEPT_ROOMS = 4096
_CHECK_SECONDS = 0.05


class ConcludedRooms:
    """Rooms whose KV is gone, newest last."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._next_check = 0.0
        self._outlived: list[int] = []

    def add(self, room: int | None, reason: str) -> None:
        """Remember a room that was given up."""
        if room is None:
            return
        self._reasons[room] = reason
        if len(self._reasons) > _KEPT_ROOMS:
            oldest = next(iter(self._reasons))
            del self._reasons[oldest]
            self._outlived.append(oldest)

    def forget(self, room: int | None) -> None:
        """A new request uses the room."""
        if room is not None:
            self._reasons.pop(room, None)
            if room in self._outlived:
                self._outlived.remove(room)

    def answer(self, manager: Any, *, now: float, failed: Any) -> int:
        """Tell those who have asked since the last call that there is nothing to come.

        Args:
            manager: SGLang's KV manager of the prefill role.
            now: monotonic time.
            failed: SGLang's status for a failed transfer.

        Returns:
            How many rooms were answered.
        """
        if not self._reasons or now < self._next_check:
            return 0
        self._next_check = now + _CHECK_SECONDS
        asked = [room for room in list(manager.transfer_infos) if room in self._reasons]
        for room in asked:
            manager.send_kv_status_message(
                targets=manager._room_notify_targets(room),
                bootstrap_room=room,
                status=failed,
                failure_reason=self._reasons[room],
            )
            _forget(manager, room)
        while self._outlived:
            _forget(manager, self._outlived.pop())
        return len(asked)


def _forget(manager: Any, room: int) -> None:
    """SGLang keeps what it knew of a room that was aborted between two chunks for ever."""
    for table in (
        manager.transfer_infos,
        manager.request_status,
        manager.req_to_decode_prefix_len,
        manager.failure_records,
    ):
        table.pop(room, None)
