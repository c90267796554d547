"""Messages from the scheduler process to the agent: one msgpack map per packet of the agent's SOCK_SEQPACKET socket.

The key `type` tells them apart (hello, heartbeat, load, request). Unknown fields are ignored on decoding, so that agent
and plugin may be one release apart. All times are seconds; `now` fields are the sender's time.monotonic(), which on
Linux is the same clock in every process of a machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AGENT_SOCKET_VARIABLE = "KLLM_AGENT_SOCKET"
PARKED_LIMIT_VARIABLE = "KLLM_PARKED_LIMIT_TOKENS"
PARK_TIMEOUT_VARIABLE = "KLLM_PARK_TIMEOUT_SECONDS"
PACE_VARIABLE = "KLLM_PACE"
PREFILL_ORDER_VARIABLE = "KLLM_PREFILL_ORDER"
PREFIX_TREE_VARIABLE = "KLLM_PREFIX_TREE"
MAXIMUM_MESSAGE_BYTES = 65536

RequestKind = Literal["prefill_done", "requeued", "released", "failed"]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """Facts of one server, sent once its scheduler is initialised, and again after a role switch or a reconnect.

    Attributes:
        problems: what makes this server unfit to serve, in words for people; empty when it is fit.
        hooks_installed: hook targets that took.
        hooks_missing: hook targets that did not take; each of them is in `problems` too.
        optimistic_attempts: effective value after SGLang's own resets; 0 means that late binding is off.
        binding_reason: why late binding is off, CamelCase; empty when it is on.
        context_tokens: longest prompt plus output of one request, as it was configured.
        request_tokens: the same as SGLang keeps it, a few tokens less; a prompt must be shorter than this.
        parked_limit_tokens: watermark of parked KV (0 on decode).
        page_size: tokens per KV page.
        pace: least durations of steps, as the command line gives them; empty when steps are as they are.
        flip_obstacle: why it cannot switch roles; empty when it can.
    """

    pid: int
    now: float
    engine_version: str
    role: Literal["prefill", "decode", "null"]
    page_size: int
    kv_type: str
    optimistic_attempts: int
    binding_reason: str
    max_total_num_tokens: int
    max_running_requests: int
    context_tokens: int
    request_tokens: int
    parked_limit_tokens: int
    hooks_installed: list[str]
    hooks_missing: list[str]
    problems: list[str]
    pace: str = ""
    flip_obstacle: str = ""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """Sent by a thread each half second, whatever the scheduler's loop does.

    Attributes:
        loops: iterations of the event loop so far; standing still while `busy_seconds` grows means a hung step.
        loop_age: seconds since the last iteration began. An idle engine iterates at least once a second.
    """

    pid: int
    now: float
    loops: int
    loop_age: float


class Load(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="load"):
    """State of the scheduler; fields as in LoadReport of the contract `kllm.engine.v1`.

    Attributes:
        paced_steps: steps since the start whose duration was to be that of a model; 0 when steps are as they are.
        late_steps: those that took longer.
        late_seconds: by which they took longer, together.
    """

    pid: int
    now: float
    role: Literal["prefill", "decode", "null"]
    running_requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    queued_uncached_tokens: int = 0
    parked_requests: int = 0
    parked_tokens: int = 0
    parked_limit_tokens: int = 0
    kv_used_tokens: int = 0
    kv_evictable_tokens: int = 0
    kv_total_tokens: int = 0
    transferring_requests: int = 0
    retracted_requests: int = 0
    prefill_step_seconds: float = 0.0
    decode_step_seconds: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    accept_length: float = 0.0
    max_running_requests: int = 0
    total_prefill_tokens: int = 0
    total_decode_tokens: int = 0
    total_prefill_busy_seconds: float = 0.0
    total_decode_busy_seconds: float = 0.0
    paced_steps: int = 0
    late_steps: int = 0
    late_seconds: float = 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="request"):
    """A milestone of one request on a prefill instance; never dropped by the sender short of 65,536 unsent ones.

    Attributes:
        reason: CamelCase. released: Transferred, ParkTimeout, Aborted; requeued: Yielded; failed: TransferFailed,
            BootstrapFailed, Aborted.
        bound: prefill_done: a decode instance had already asked for the KV, so nothing was parked.
        parked_seconds: how long the KV waited for a decode instance.
    """

    pid: int
    now: float
    kind: RequestKind
    rid: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    parked_seconds: float = 0.0
    bound: bool = False
    reason: str = ""
    message: str = ""


Message = Hello | Heartbeat | Load | Request

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Message as one packet."""
    return _encoder.encode(message)


def decode(packet: bytes) -> Message:
    """Message of one packet.

    Raises:
        msgspec.DecodeError: the packet is not one of the messages (msgspec.ValidationError is a subclass).
    """
    return _decoder.decode(packet)
