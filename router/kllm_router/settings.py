"""Limits and timeouts of the router's data plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from kllm_router.scheduling.budget import BudgetSettings


@dataclass(frozen=True)
class HttpLimits:
    """What one client may take."""

    head_bytes: int = 32 * 1024
    """Request line and headers; more is answered with 431."""
    header_count: int = 100
    """Header lines, trailers included; more is answered with 431."""
    body_bytes: int = 8 * 1024 * 1024
    """Request body; more is answered with 413."""
    head_seconds: float = 10.0
    """From a request's first byte, or from the connection, to the end of its headers; then 408."""
    body_seconds: float = 60.0
    """From the end of the headers to the end of the body; then 408."""
    keep_alive_seconds: float = 75.0
    """Idle connections live this long. Longer than load balancers' 60 s, so that they close first."""
    write_stall_seconds: float = 60.0
    """A client that takes no byte for so long is disconnected, and its request aborted."""
    connections: int = 8192
    """Open connections; further ones are answered with 503."""
    pipelined: int = 16
    """Requests that wait behind the one being answered; above it nothing more is read from the connection."""
    write_buffer_bytes: int = 256 * 1024
    """Above it nothing more is read from the engine until the client has taken some."""
    linger_seconds: float = 2.0
    """After a refusal, further input is read and dropped for so long, so that the client can read the answer."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds; what is exceeded ends the request with 504 or 503 and aborts it on both engines."""

    connect: float = 2.0
    """TCP connection to an engine."""
    prefill: float = 300.0
    """Arrival until the prompt's KV is complete, queue included."""
    first_token: float = 60.0
    """Decode instance asked until its first byte of a stream."""
    stall: float = 60.0
    """Between two reads of a stream that has begun, whatever else is known of the instance."""
    silence: float = 3.0
    """Without a byte, until the instance's load is asked whether it still has the request. It is asked twice,
    each `sweep_seconds`; a second is left of the five in which a client hears of a fault that nothing can mend."""
    total: float = 3600.0
    """The whole request."""
    abort: float = 5.0
    """One abort call; what fails then is counted and left to the engine's own timeouts."""
    release: float = 30.0
    """First token until the prefill instance's own answer; then it is aborted there."""
    prefill_lost: float = 1.0
    """After the prefill instance was lost during the handshake: time for a transfer that was complete to show."""


@dataclass(frozen=True)
class PoolLimits:
    """Connections to engines."""

    idle_seconds: float = 4.0
    """Below the engine's own 5 s, so that a reused connection is seldom one that it just closed."""
    idle_per_engine: int = 128
    """Idle connections kept per engine process."""
    response_bytes: int = 64 * 1024 * 1024
    """Whole responses and single events; more ends the request with 502."""
    unread_bytes: int = 256 * 1024
    """A stream that nobody reads yet is paused above this."""


@dataclass(frozen=True)
class RecoverySettings:
    """What is done about instances that fail requests."""

    prefill_retries: int = 2
    """Prefill instances that one request may lose."""
    decode_retries: int = 2
    """Decode instances that one request may lose before its first byte."""
    continuations: int = 2
    """Decode instances that one stream may lose after its first byte."""
    continue_streams: bool = True
    """Whether broken streams go on at all; it costs a line of token ids in each part that an engine sends."""
    patience_seconds: float = 3.5
    """How long a request that has lost its instance, or whose prompt is computed, waits for one that can go on with it,
    from the lost one's last sign of life. What nobody can serve is answered with 503 within 5 seconds."""
    kept_bytes: int = 4 * 1024 * 1024
    """Written token ids kept per stream; a longer stream cannot go on."""
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    """Shared by all requests."""


@dataclass(frozen=True)
class WaitSettings:
    """What becomes of new requests while no instance serves, such as those that a service at zero wakes up for."""

    seconds: float = 0.0
    """How long such a request waits for instances to start; 0: it is refused at once."""
    requests: int = 1024
    """That wait at a time; further ones are refused."""
    bytes: int = 64 * 1024 * 1024
    """Of all that wait, as engines will get them; what would be more is refused."""


@dataclass(frozen=True)
class Settings:
    """All of them."""

    http: HttpLimits = field(default_factory=HttpLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    pool: PoolLimits = field(default_factory=PoolLimits)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    wait: WaitSettings = field(default_factory=WaitSettings)
    sweep_seconds: float = 0.5
    """How often deadlines of connections are checked; their precision."""
