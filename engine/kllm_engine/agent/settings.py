"""What one agent was told to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kllm_core.objectives import Role
from kllm_engine.agent.exceptions import SettingsError
from kllm_engine.pace import Pace

_HIGHEST_PORT = 65_535
_SOCKET_PATH_BYTES = 107
"""Longest path that a Unix socket can be bound to on Linux."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """One agent and its engine.

    Attributes:
        instance_id: unique in the fleet.
        role: None is a slot, which is told its role later.
        model: path of the model.
        model_name: name that clients use.
        listen: host:port of the agent's gRPC server; port 0 takes a free one.
        token: fleet token; guards gRPC and the engine's HTTP API.
        zygote_socket: of a zygote that runs already; None starts one of the agent's own.
        run_dir: directory for sockets and logs, readable by the owner only.
        page_size: tokens per KV block; prefill and decode of a service agree on it.
        kv_type: data type of the KV cache, or Auto.
        context_tokens: longest prompt plus output; None leaves it to the model.
        engine_args: SGLang's flags by name, which override kLLM's own; those of each role that has any.
        http_host: where the engine's HTTP API listens.
        http_port: its port; None takes a free one.
        bootstrap_port: where decode instances find this one's KV; None takes a free port.
        advertise_host: host by which routers and other engines reach this one.
        drain_seconds: on SIGTERM, time for running requests to finish.
        forward_engine_log: the engine's log is copied to the agent's stderr, and its file is kept small.
        start_timeout_seconds: from the start of the agent until the engine serves, then it is given up; of a slot, from
            its start until it has its zygote, and from its assumption of a role until the engine serves.
        heartbeat_timeout_seconds: without a sign of life for so long the instance has failed, as its engine hangs.
        hang_grace_seconds: an engine that hangs may come back for so long; then it is killed.
        step_timeout_seconds: an engine step that takes longer while there is work counts as hung.
        park_timeout_seconds: how long prefilled KV waits for a decode instance; None is the plugin's default.
        parked_limit_tokens: nothing is prefilled without a decode instance above it; None is the plugin's default.
        pace: how long steps are made to last; None leaves them as they are.
        flippable: the instance shall be able to switch between prefill and decode, if its engine can.
    """

    instance_id: str
    service: str
    role: Role | None
    model: str
    model_name: str
    listen: str
    token: str = field(repr=False)
    run_dir: Path
    zygote_socket: Path | None = None
    page_size: int = 16
    kv_type: str = "Auto"
    context_tokens: int | None = None
    engine_args: Mapping[Role, Mapping[str, Any]] = field(default_factory=dict)
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    bootstrap_port: int | None = None
    advertise_host: str = "127.0.0.1"
    drain_seconds: float = 0.0
    forward_engine_log: bool = False
    start_timeout_seconds: float = 300.0
    heartbeat_timeout_seconds: float = 3.0
    hang_grace_seconds: float = 5.0
    step_timeout_seconds: float = 120.0
    park_timeout_seconds: float | None = None
    parked_limit_tokens: int | None = None
    pace: Pace | None = None
    flippable: bool = True

    def __post_init__(self) -> None:
        for name in ("start_timeout_seconds", "heartbeat_timeout_seconds", "step_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.page_size < 1:
            raise SettingsError(f"--page-size must be at least 1, got {self.page_size}")
        for name in ("drain_seconds", "hang_grace_seconds"):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        self._check_ports()
        if self.role is None and self.zygote_socket is not None:
            raise SettingsError("--slot keeps a zygote of its own: leave --zygote out")
        if "/" in self.instance_id or not self.instance_id:
            raise SettingsError(f"--instance-id must be a name without slashes, got {self.instance_id!r}")
        if not self.run_dir.is_dir():
            raise SettingsError(f"--run-dir {self.run_dir} is not a directory")
        longest = max(
            (self.plugin_socket, self.own_zygote_socket, *self.cache_sockets), key=lambda path: len(str(path))
        )
        if len(str(longest).encode()) > _SOCKET_PATH_BYTES:
            raise SettingsError(
                f"--run-dir is too long: {longest} exceeds the {_SOCKET_PATH_BYTES} bytes of a Unix socket's path"
            )

    def _check_ports(self) -> None:
        for name in ("http_port", "bootstrap_port"):
            port = getattr(self, name)
            if port is not None and not 1 <= port <= _HIGHEST_PORT:
                raise SettingsError(f"--{name.replace('_', '-')} must be 1 to {_HIGHEST_PORT}, got {port}")
        if self.http_port is not None and self.http_port == self.bootstrap_port:
            raise SettingsError(f"--http-port and --bootstrap-port must differ, both are {self.http_port}")

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles in which its first engine may start."""
        return tuple(Role) if self.role is None else (self.role,)

    @property
    def plugin_socket(self) -> Path:
        """Where the engine's plugin reports."""
        return self.run_dir / f"{self.instance_id}.plugin.sock"

    @property
    def own_zygote_socket(self) -> Path:
        """Where the agent's own zygote listens."""
        return self.run_dir / f"{self.instance_id}.zygote.sock"

    @property
    def cache_sockets(self) -> tuple[Path, Path]:
        """Where the engine publishes its KV events, and where it repeats them."""
        return self.run_dir / f"{self.instance_id}.kv.sock", self.run_dir / f"{self.instance_id}.replay.sock"

    @property
    def log_path(self) -> Path:
        """Log of the engine; the agent itself writes to its stderr."""
        return self.run_dir / "logs" / f"{self.instance_id}.engine.log"
