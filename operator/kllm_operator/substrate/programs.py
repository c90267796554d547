"""The command lines of everything that runs on one machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.substrate.rundir import RunDirectory

_ROUTER_DRAIN_SECONDS = 0.3
"""Who stops a service on one machine waits for it at a terminal; on a cluster routers drain for longer."""


def _module(name: str) -> tuple[str, ...]:
    # -P keeps the current folder out of the module path: a file there must not hide a module.
    return (sys.executable, "-P", "-m", name)


@dataclass(frozen=True)
class Programs:
    """What to execute; tests put small programs here that print the same events."""

    engine: tuple[str, ...] = field(default_factory=lambda: _module("kllm_engine.main"))
    router: tuple[str, ...] = field(default_factory=lambda: _module("kllm_router.main"))


@dataclass(frozen=True)
class RouterAddress:
    """Where the router is to listen, and to whom.

    Attributes:
        port: 0 lets the kernel choose, as for `grpc_port`.
        api_key_file: keys that clients may use, one a line; None lets everyone in.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 0
    api_key_file: Path | None = None


@dataclass(frozen=True)
class Commands:
    """Command lines of one service's processes. All of them end with the process that makes them here.

    Attributes:
        pace: how long the engines' steps are made to last; None leaves them as they are.
    """

    programs: Programs
    service: InferenceService
    run: RunDirectory
    pace: str | None = None

    def model(self, cache: Path) -> tuple[str, ...]:
        """Makes the model available in the cache directory."""
        return (*self.programs.engine, "model", self.service.spec.model.uri, "--cache", str(cache), *self._parent())

    def zygote(self) -> tuple[str, ...]:
        """Preloads the engine's code and forks servers."""
        return (*self.programs.engine, "zygote", "--socket", str(self.run.zygote_socket), *self._parent())

    def agent(self, instance_id: str, role: Role, model: Path) -> tuple[str, ...]:
        """One instance."""
        spec = self.service.spec
        return (
            *self.programs.engine, "agent",
            "--instance-id", instance_id,
            "--service", self.service.name,
            "--role", role.value,
            "--model", str(model),
            "--model-name", spec.model.name,
            "--listen", "127.0.0.1:0",
            "--token-file", str(self.run.token_file),
            "--zygote", str(self.run.zygote_socket),
            "--run-dir", str(self.run.path),
            "--page-size", str(spec.cache.page_size),
            "--kv-type", spec.cache.kv_type.value,
            "--engine-args", json.dumps((spec.prefill if role is Role.PREFILL else spec.decode).engine_args),
            *(() if self.pace is None else ("--pace", self.pace)),
            *self._parent(),
        )  # fmt: skip

    def router(self, address: RouterAddress, model: Path) -> tuple[str, ...]:
        """The router."""
        spec = self.service.spec
        host = f"[{address.host}]" if ":" in address.host else address.host
        return (
            *self.programs.router,
            "--listen", f"{host}:{address.port}",
            "--grpc-listen", f"{host}:{address.grpc_port}",
            "--fleet", str(self.run.fleet_file),
            "--token-file", str(self.run.token_file),
            "--model-name", spec.model.name,
            "--tokenizer", str(model),
            "--page-size", str(spec.cache.page_size),
            "--binding", spec.router.binding.value,
            "--drain-seconds", str(_ROUTER_DRAIN_SECONDS),
            *(("--wait-for-start-seconds", str(spec.wait_for_start_seconds)) if spec.wait_for_start_seconds else ()),
            *(() if address.api_key_file is None else ("--api-key-file", str(address.api_key_file))),
            *self._parent(),
        )  # fmt: skip

    def _parent(self) -> tuple[str, str]:
        return ("--parent-pid", str(os.getpid()))
