"""The plugin's way to its agent: it never waits, keeps every request event, and of the rest only the newest."""

from __future__ import annotations

import collections
import logging
import socket
import threading
import time
from pathlib import Path

from kllm_engine.messages import Heartbeat, Hello, Load, Message, Request, encode

_log = logging.getLogger(__name__)

EVENT_LIMIT = 65_536
_RECONNECT_SECONDS = 0.2


class AgentLink:
    """Sends to the agent's socket from the scheduler's thread and the heartbeat's.

    Args:
        path: the agent's SOCK_SEQPACKET socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._next_attempt = 0.0
        self._hello: Hello | None = None
        self._hello_is_due = False
        self._events: collections.deque[Request] = collections.deque()
        self._load: Load | None = None
        self._heartbeat: Heartbeat | None = None
        self.lost_events = 0

    def put(self, message: Message) -> None:
        """Take a message to be sent; an older one of the same kind that is still here gives way, but no event does."""
        with self._lock:
            if isinstance(message, Hello):
                self._hello, self._hello_is_due = message, True
            elif isinstance(message, Load):
                self._load = message
            elif isinstance(message, Heartbeat):
                self._heartbeat = message
            elif len(self._events) < EVENT_LIMIT:
                self._events.append(message)
            else:
                self.lost_events += 1

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        with self._lock:
            if self._channel is None and not self._connect():
                return
            try:
                self._send_all()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("the agent's socket broke: %s", error)
                self._disconnect()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    def _send_all(self) -> None:
        if self._hello is not None and self._hello_is_due:
            self._send(self._hello)
            self._hello_is_due = False
        while self._events:
            self._send(self._events[0])
            self._events.popleft()
        if self._load is not None:
            self._send(self._load)
            self._load = None
        if self._heartbeat is not None:
            self._send(self._heartbeat)
            self._heartbeat = None

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _connect(self) -> bool:
        now = time.monotonic()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + _RECONNECT_SECONDS
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            channel.connect(str(self._path))
        except OSError:
            channel.close()
            return False
        self._channel = channel
        # A new agent knows nothing of this server.
        self._hello_is_due = True
        return True

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
