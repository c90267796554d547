"""SGLang's arguments and environment for one instance; nothing here imports SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kllm_core.kinds.arguments import RESERVED_ENGINE_ARGS
from kllm_core.objectives import Role
from kllm_engine.messages import (
    AGENT_SOCKET_VARIABLE,
    PACE_VARIABLE,
    PARK_TIMEOUT_VARIABLE,
    PARKED_LIMIT_VARIABLE,
)
from kllm_engine.pace import Pace
from kllm_engine.sglang.roles import Value, flip_obstacle

Device = Literal["cpu", "cuda"]

OPTIMISTIC_ATTEMPTS = 1_000_000
"""As good as unbounded: a prompt may be prefilled before its decode instance is known, however often it yields."""

DEFAULT_PARK_TIMEOUT_SECONDS = 120.0
"""Twice what routers wait for a first token: KV that is parked longer has lost its router."""

_QUEUE_ALLOWANCE_SECONDS = 3600
"""SGLang's own bootstrap timeout runs from the arrival; it must outlast queue, prefill and park together."""

_KV_TYPES = {"Auto": "auto", "BF16": "bf16", "FP8E4M3": "fp8_e4m3", "FP8E5M2": "fp8_e5m2"}


_SMALL_BATCH = 32


class ArgumentsError(ValueError):
    """A setting that SGLang cannot be given; the message names it."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One SGLang server.

    Attributes:
        model_path: folder with config, tokenizer and weights.
        model_name: name that clients give.
        http_port: its HTTP API.
        bootstrap_port: where decode instances find this one's KV.
        distributed_port: rendezvous of its own processes; unique on the machine.
        host: address that the HTTP API listens on.
        advertise_host: address that other instances reach this one by.
        page_size: tokens per KV block, equal for prefill and decode.
        kv_type: Auto, BF16, FP8E4M3, FP8E5M2; equal for prefill and decode.
        context_tokens: longest prompt plus output; None takes the model's, on the CPU at most 8,192.
        api_key: every HTTP call must carry it.
        agent_socket: where the plugin reports; None leaves the plugin silent.
        engine_args: SGLang arguments without leading dashes that replace the defaults; true stands for a flag without
            a value, false or None takes a default away.
        other_engine_args: those of the service's other role, which may rule out that this instance takes it.
        kv_events_endpoint: ZMQ endpoint (`ipc://PATH` or `tcp://*:PORT`) of KV cache events; None turns them off.
        kv_replay_endpoint: ZMQ endpoint from which missed events are fetched.
        parked_limit_tokens: most prefilled tokens that wait for a decode instance; None takes half of the pool.
        park_timeout_seconds: after which prefilled KV that no decode instance took is freed.
        pace: how long steps are made to last; None leaves them as they are.
        flippable: it shall be able to switch between prefill and decode; see `Launch.flip_obstacle`.
    """

    role: Role
    model_path: Path
    model_name: str
    http_port: int
    bootstrap_port: int
    distributed_port: int
    device: Device
    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    page_size: int = 16
    kv_type: str = "Auto"
    context_tokens: int | None = None
    agent_socket: Path | None = None
    engine_args: Mapping[str, Value] = field(default_factory=dict)
    other_engine_args: Mapping[str, Value] = field(default_factory=dict)
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    parked_limit_tokens: int | None = None
    park_timeout_seconds: float = DEFAULT_PARK_TIMEOUT_SECONDS
    pace: Pace | None = None
    flippable: bool = False


@dataclass(frozen=True)
class Launch:
    """What the zygote is asked to run.

    Attributes:
        flip_obstacle: why it cannot switch roles; empty when it can.
    """

    arguments: tuple[str, ...] = field(repr=False)
    environment: dict[str, str]
    flip_obstacle: str = ""


def detect_device(dev: Path = Path("/dev")) -> Device:
    """`cuda` where an NVIDIA device node exists, else `cpu`."""
    return "cuda" if any(dev.glob("nvidia[0-9]*")) else "cpu"


def import_environment(device: Device) -> dict[str, str]:
    """Environment that must stand before SGLang is imported."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_PLUGINS": "kllm",
        # Ready-made families first: SGLang then imports its 240 other model files only for a model outside of them.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "kllm_engine.sglang.families",
    }
    if device == "cpu":
        return common | {
            "SGLANG_USE_CPU_ENGINE": "1",
            # One thread per server: several servers share the cores, and waiting OpenMP threads would spin on them.
            "OMP_NUM_THREADS": "1",
            # Some samplers would be compiled on first use, half a minute in which the scheduler serves nobody.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return common | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def launch(settings: EngineSettings) -> Launch:
    """Arguments and environment of one server.

    Raises:
        ArgumentsError: an engine argument is reserved or the KV type is unknown.
    """
    reserved = sorted(set(settings.engine_args) & RESERVED_ENGINE_ARGS)
    if reserved:
        raise ArgumentsError(f"engineArgs must not set {', '.join(reserved)}: kLLM sets them from other fields")
    if settings.kv_type not in _KV_TYPES:
        raise ArgumentsError(f"kvType {settings.kv_type!r} is unknown; there are {', '.join(_KV_TYPES)}")
    obstacle = "it was started for one role"
    if settings.flippable:
        obstacle = flip_obstacle(settings.engine_args) or flip_obstacle(settings.other_engine_args)
    arguments = _identity(settings) | _device_defaults(settings)
    arguments |= _role(settings) if obstacle else _roles(settings, arguments | dict(settings.engine_args))
    if settings.context_tokens is not None:
        arguments["context-length"] = settings.context_tokens
    arguments |= settings.engine_args
    return Launch(tuple(_flatten(arguments)), _environment(settings), obstacle)


def _identity(settings: EngineSettings) -> dict[str, Value]:
    return {
        "model-path": str(settings.model_path),
        "served-model-name": settings.model_name,
        "host": settings.host,
        "port": settings.http_port,
        "nccl-port": settings.distributed_port,
        "api-key": settings.api_key,
        "device": settings.device,
        "page-size": settings.page_size,
        "kv-cache-dtype": _KV_TYPES[settings.kv_type],
        "grammar-backend": "xgrammar",
        # Without a parser SGLang returns tool calls as text; with it, required and named tools follow their schema.
        "tool-call-parser": "pythonic",
        "enable-metrics": True,
        # The agent's readiness waits for the plugin's self-check, not for a generated token.
        "skip-server-warmup": True,
        # Without it every idle scheduler spins on a core.
        "sleep-on-idle": True,
        "log-level": "info",
        # The agent asks every two seconds whether it is ready: such lines would bury the cause of a failure.
        "log-level-http": "warning",
    }


def _role(settings: EngineSettings) -> dict[str, Value]:
    """Arguments of an instance that keeps its role."""
    common: dict[str, Value] = {
        "disaggregation-mode": settings.role.value,
        "disaggregation-transfer-backend": "mooncake",
    }
    return common | (_decode() if settings.role is Role.DECODE else _prefill(settings))


def _roles(settings: EngineSettings, known: Mapping[str, Value]) -> dict[str, Value]:
    """Arguments of an instance that may switch: both roles', and each of them such that the other can follow.

    Args:
        settings: the instance.
        known: what is set otherwise.
    """
    arguments = _role(settings) | _decode() | _prefill(settings)
    arguments["enable-pd-role-switch"] = True
    if not known.get("disable-radix-cache"):
        # A prefill instance keeps its prefix cache object, which a decode instance uses rightly with this flag only:
        # without it the second request with a common prefix would end the scheduler.
        arguments["disaggregation-decode-enable-radix-cache"] = True
    running = known.get("max-running-requests")
    if isinstance(running, int) and running <= _SMALL_BATCH:
        # What SGLang takes for a decode instance, and takes to be 0 for a prefill instance that becomes one.
        arguments["disaggregation-decode-extra-slots"] = 2 * running
    return arguments


def _decode() -> dict[str, Value]:
    # The default pins a pool of host memory through CUDA: that takes seconds of a start, and needs CUDA.
    return {"disaggregation-decode-retraction-backup": "cpu_tensor"}


def _prefill(settings: EngineSettings) -> dict[str, Value]:
    arguments: dict[str, Value] = {
        "disaggregation-bootstrap-port": settings.bootstrap_port,
        "optimistic-prefill-attempts": OPTIMISTIC_ATTEMPTS,
    }
    if settings.kv_events_endpoint is not None:
        events = {"publisher": "zmq", "endpoint": settings.kv_events_endpoint, "topic": ""}
        if settings.kv_replay_endpoint is not None:
            events["replay_endpoint"] = settings.kv_replay_endpoint
        arguments["kv-events-config"] = json.dumps(events)
    return arguments


def _device_defaults(settings: EngineSettings) -> dict[str, Value]:
    if settings.device != "cpu":
        return {}
    return {
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "dtype": "float32",
        "disable-cuda-graph": True,
        "disable-overlap-schedule": True,
        # SGLang takes all memory that the machine loses while it loads for its own weights, other engines' too, and
        # ends itself when the rest holds no pool. The pool's size comes from the next line alone.
        "mem-fraction-static": 0.9,
        "max-total-tokens": 16384,
        "max-running-requests": 16,
        "chunked-prefill-size": 2048,
        "context-length": 8192,
    }


def _environment(settings: EngineSettings) -> dict[str, str]:
    bootstrap_timeout = int(settings.park_timeout_seconds) + _QUEUE_ALLOWANCE_SECONDS
    environment = import_environment(settings.device) | {
        # Without it the transfer engine picks the machine's own network address.
        "SGLANG_HOST_IP": settings.advertise_host,
        # Health must not cost a generated token, which would also wait behind the queue.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(bootstrap_timeout),
        PARK_TIMEOUT_VARIABLE: f"{settings.park_timeout_seconds:g}",
    }
    if settings.device == "cpu":
        environment |= {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
    if settings.agent_socket is not None:
        environment[AGENT_SOCKET_VARIABLE] = str(settings.agent_socket)
    if settings.parked_limit_tokens is not None:
        environment[PARKED_LIMIT_VARIABLE] = str(settings.parked_limit_tokens)
    if settings.pace is not None:
        environment[PACE_VARIABLE] = str(settings.pace)
    return environment


def _flatten(arguments: Mapping[str, Value]) -> Sequence[str]:
    flat: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        if str(value).startswith("-"):
            # Apart from its name it would be read as a flag; tokens may begin so.
            flat.append(f"--{name}={value}")
            continue
        flat.append(f"--{name}")
        if value is not True:
            flat.append(str(value))
    return flat
