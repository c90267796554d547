"""What agent and zygote say to each other: one JSON message per packet of a Unix SOCK_SEQPACKET connection.

A connection is one server's life line: fork, started, exited. Closing it kills the server.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAXIMUM_PACKET_BYTES = 131_072
"""Below the kernel's default socket buffer, so that one packet always fits."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="fork", forbid_unknown_fields=True):
    """Start a server.

    Attributes:
        name: for logs.
        args: SGLang's arguments.
        env: added to the server's environment.
        log: file that takes its stdout and stderr.
    """

    name: _Name
    args: list[str]
    env: dict[str, str]
    log: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="kill", forbid_unknown_fields=True):
    """Kill the connection's server and all its processes; `exited` follows."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="started"):
    """The server's first process runs."""

    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="exited"):
    """The server's first process has ended, and the rest of its process group was killed.

    Attributes:
        status: exit code, or minus the signal's number.
    """

    status: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="refused"):
    """The request could not be carried out."""

    message: str


Request = Fork | Kill
Event = Started | Exited | Refused

_encoder = msgspec.json.Encoder()
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(message: Request | Event) -> bytes:
    """Message as one packet.

    Raises:
        ValueError: it does not fit one.
    """
    packet = _encoder.encode(message)
    if len(packet) > MAXIMUM_PACKET_BYTES:
        raise ValueError(
            f"a {type(message).__name__} of {len(packet)} bytes is above the {MAXIMUM_PACKET_BYTES} allowed"
        )
    return packet


def decode_request(packet: bytes) -> Request:
    """Request of one packet.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _requests.decode(packet)


def decode_event(packet: bytes) -> Event:
    """Event of one packet.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _events.decode(packet)
