"""How one engine is run: its ports, sockets, arguments and environment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kllm_core.objectives import Role
from kllm_engine.agent.exceptions import SettingsError
from kllm_engine.agent.ports import free_ports
from kllm_engine.agent.settings import AgentSettings
from kllm_engine.sglang.arguments import (
    DEFAULT_PARK_TIMEOUT_SECONDS,
    ArgumentsError,
    EngineSettings,
    detect_device,
    launch,
)

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Ports:
    """TCP ports of one engine."""

    http: int
    bootstrap: int
    distributed: int

    @classmethod
    def choose(cls, settings: AgentSettings) -> Ports:
        """Those that are set, and free ones for the others.

        Raises:
            OSError: too few are free.
        """
        fixed = {port for port in (settings.http_port, settings.bootstrap_port) if port is not None}
        http, bootstrap, distributed = free_ports(3, rng=random.SystemRandom(), but=fixed)
        return cls(settings.http_port or http, settings.bootstrap_port or bootstrap, distributed)


@dataclass(frozen=True)
class Launch:
    """One engine's way to run.

    Attributes:
        role: that it starts in.
        local_host: where the agent reaches the engine's HTTP API.
        cache_events: ZMQ endpoint of KV events, None when this role publishes none.
        cache_replay: ZMQ endpoint that repeats them.
        flip_obstacle: why the engine cannot switch roles; empty when it can.
    """

    role: Role
    ports: Ports
    local_host: str
    arguments: tuple[str, ...] = field(repr=False)
    environment: dict[str, str] = field(repr=False)
    cache_events: str | None
    cache_replay: str | None
    flip_obstacle: str

    @classmethod
    def prepare(cls, settings: AgentSettings, role: Role) -> Launch:
        """Choose ports and build arguments for an engine that starts in a role.

        Raises:
            SettingsError: an argument cannot be given to the engine.
            OSError: no ports are free.
        """
        ports = Ports.choose(settings)
        events, replay = (_endpoint(path) for path in settings.cache_sockets)
        park_timeout = settings.park_timeout_seconds
        try:
            engine = launch(
                EngineSettings(
                    role=role,
                    model_path=Path(settings.model),
                    model_name=settings.model_name,
                    http_port=ports.http,
                    bootstrap_port=ports.bootstrap,
                    distributed_port=ports.distributed,
                    device=detect_device(),
                    api_key=settings.token,
                    host=settings.http_host,
                    advertise_host=settings.advertise_host,
                    page_size=settings.page_size,
                    kv_type=settings.kv_type,
                    context_tokens=settings.context_tokens,
                    agent_socket=settings.plugin_socket,
                    engine_args=_engine_args(settings, role),
                    other_engine_args=_engine_args(settings, role.other),
                    kv_events_endpoint=events,
                    kv_replay_endpoint=replay,
                    parked_limit_tokens=settings.parked_limit_tokens,
                    pace=settings.pace,
                    flippable=settings.flippable,
                    park_timeout_seconds=DEFAULT_PARK_TIMEOUT_SECONDS if park_timeout is None else park_timeout,
                )
            )
        except ArgumentsError as error:
            raise SettingsError(str(error)) from error
        publishes = role is Role.PREFILL or not engine.flip_obstacle
        return cls(
            role=role,
            ports=ports,
            local_host=_WILDCARDS.get(settings.http_host, settings.http_host),
            arguments=engine.arguments,
            environment=engine.environment,
            cache_events=events if publishes else None,
            cache_replay=replay if publishes else None,
            flip_obstacle=engine.flip_obstacle,
        )


def _engine_args(settings: AgentSettings, role: Role) -> Mapping[str, Any]:
    return settings.engine_args.get(role, {})


def _endpoint(path: Path) -> str:
    return f"ipc://{path}"
