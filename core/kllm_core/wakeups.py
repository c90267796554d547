"""Event loops that take news of gRPC as fast as they come, however much else they have to do."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_MOST_BYTES = 65536
_Arguments = TypeVarTuple("_Arguments")


class PromptWakeups:
    """Stands before a loop's class among its bases, and changes how the loop is woken by `grpc.aio`.

    A thread of gRPC's writes one byte into a socket for each event, and what reads of that socket takes one byte a turn
    of the loop, though all events that there are. With turns of some milliseconds and thousands of streams the socket
    fills up, the thread waits in its write, and from then on there is one event a turn: reports of agents come half a
    minute late, streams seem silent and are opened anew, which makes even more events. Here all bytes but one are taken
    before.
    """

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Arguments], Any], *args: *_Arguments) -> None:
        """See `asyncio.loop.add_reader`."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            super().add_reader(fd, _woken_once, fd, functools.partial(callback, *args))  # type: ignore[misc]
        else:
            super().add_reader(fd, callback, *args)  # type: ignore[misc]


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    bound = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(bound, "__self__", None)).__name__ == "PollerCompletionQueue"


def _woken_once(wakeups: socket.socket, callback: Callable[[], Any]) -> None:
    # An event is there before its byte is, so that none of those whose bytes are taken here is overlooked.
    waiting = len(wakeups.recv(_MOST_BYTES, socket.MSG_PEEK))
    if waiting > 1:
        wakeups.recv(waiting - 1)
    callback()
