"""`kllm-engine agent`: flags, and the exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from kllm_core.authentication import read_token_file
from kllm_core.models.exceptions import ModelError
from kllm_core.objectives import Role
from kllm_engine.agent.exceptions import SettingsError
from kllm_engine.agent.settings import AgentSettings
from kllm_engine.models.folder import check_folder
from kllm_engine.pace import Pace, PaceError, parse_pace
from kllm_engine.sglang.names import unknown_arguments


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument("--instance-id", required=True, help="unique in the fleet")
    parser.add_argument("--service", required=True, help="name of the InferenceService")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--role", choices=[role.value for role in Role])
    place.add_argument("--slot", action="store_true", help="be ready, and start as what Assume says")
    parser.add_argument("--model", required=True, help="path of the model")
    parser.add_argument("--model-name", required=True, help="name that clients use")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port of the agent's gRPC (default %(default)s)")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the fleet token")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory for sockets and logs, mode 0700")
    parser.add_argument("--zygote", type=Path, help="socket of a running zygote; without it the agent starts its own")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV block (default %(default)s)")
    parser.add_argument("--kv-type", default="Auto", help="data type of the KV cache (default %(default)s)")
    parser.add_argument("--context-tokens", type=int, help="longest prompt plus output (default: the model's)")
    parser.add_argument("--engine-args", default="{}", help="JSON object of SGLang flags")
    for role in Role:
        parser.add_argument(
            f"--{role.value}-engine-args", default="{}", help=f"the same for an engine that starts as {role.value}"
        )
    parser.add_argument("--http-host", default="127.0.0.1", help="where the engine's HTTP API listens")
    parser.add_argument("--http-port", type=int, help="its port (default: a free one)")
    parser.add_argument("--bootstrap-port", type=int, help="where decode instances find KV (default: a free one)")
    parser.add_argument("--advertise-host", default="127.0.0.1", help="host by which others reach this instance")
    parser.add_argument("--drain-seconds", type=float, default=0.0, help="on SIGTERM, time for requests to finish")
    parser.add_argument(
        "--forward-engine-log",
        action="store_true",
        help="copy the engine's log to stderr, and keep its file in the run directory small",
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds (default %(default)s)")
    parser.add_argument(
        "--heartbeat-timeout-seconds",
        type=float,
        default=3.0,
        help="without a sign of life for so long the instance has failed (default %(default)s)",
    )
    parser.add_argument(
        "--hang-grace-seconds",
        type=float,
        default=5.0,
        help="a failed engine that hangs may come back for so long, then it is killed (default %(default)s)",
    )
    parser.add_argument(
        "--step-timeout-seconds",
        type=float,
        default=120.0,
        help="a step of the engine that takes longer counts as hung (default %(default)s)",
    )
    parser.add_argument("--park-timeout-seconds", type=float, help="how long prefilled KV waits for a decode instance")
    parser.add_argument(
        "--parked-limit-tokens", type=int, help="above it nothing is prefilled without a decode instance"
    )
    parser.add_argument(
        "--flippable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="be able to switch between prefill and decode, where the engine can",
    )
    parser.add_argument(
        "--pace",
        help="make steps last, in seconds: prefill=0.02+0.0005n+1e-8q,decode=0.03+0.002b+1e-7c (n: new token, q: "
        "n(n + 2 cached), b: sequence, c: KV token), or a .json file of {prefill: {a, b, k}, decode: {a, b, c}}",
    )


def settings_of(arguments: argparse.Namespace) -> AgentSettings:
    """Settings from parsed flags.

    Raises:
        SettingsError: a flag or the token file is wrong.
    """
    try:
        token = read_token_file(arguments.token_file)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--token-file: {error}") from error
    return AgentSettings(
        instance_id=arguments.instance_id,
        service=arguments.service,
        role=None if arguments.slot else Role(arguments.role),
        model=arguments.model,
        model_name=arguments.model_name,
        listen=arguments.listen,
        token=token,
        run_dir=arguments.run_dir,
        zygote_socket=arguments.zygote,
        page_size=arguments.page_size,
        kv_type=arguments.kv_type,
        context_tokens=arguments.context_tokens,
        engine_args={role: _engine_args(arguments, role) for role in Role},
        http_host=arguments.http_host,
        http_port=arguments.http_port,
        bootstrap_port=arguments.bootstrap_port,
        advertise_host=arguments.advertise_host,
        drain_seconds=arguments.drain_seconds,
        forward_engine_log=arguments.forward_engine_log,
        start_timeout_seconds=arguments.start_timeout,
        heartbeat_timeout_seconds=arguments.heartbeat_timeout_seconds,
        hang_grace_seconds=arguments.hang_grace_seconds,
        step_timeout_seconds=arguments.step_timeout_seconds,
        park_timeout_seconds=arguments.park_timeout_seconds,
        parked_limit_tokens=arguments.parked_limit_tokens,
        pace=_pace(arguments.pace),
        flippable=arguments.flippable,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the agent and return its exit code.

    Raises:
        SettingsError: a flag or a file is wrong.
    """
    # gRPC is imported here only: it starts threads, and `kllm-engine zygote` must stay free of them.
    from kllm_engine.agent.runtime import Agent, announce_on_stdout  # noqa: PLC0415

    settings = settings_of(arguments)
    try:
        check_folder(Path(settings.model))
    except ModelError as error:
        raise SettingsError(f"--model: {error}") from error
    if arguments.zygote is None:
        _check_names(settings)

    async def main() -> int:
        return await Agent(settings, announce=announce_on_stdout).run()

    return asyncio.run(main())


def _check_names(settings: AgentSettings) -> None:
    """Refuse what SGLang would refuse after its own zygote has imported it, which takes its time."""
    for role in Role:
        unknown = unknown_arguments(settings.engine_args.get(role, {}))
        if unknown:
            raise SettingsError(f"--{role}-engine-args: SGLang has no argument {', '.join(unknown)}")


def _pace(text: str | None) -> Pace | None:
    if not text:
        return None
    try:
        return parse_pace(Path(text).read_text() if text.endswith(".json") else text)
    except (OSError, PaceError, UnicodeDecodeError) as error:
        raise SettingsError(f"--pace: {error}") from error


def _engine_args(arguments: argparse.Namespace, role: Role) -> dict[str, Any]:
    """What both roles are given, and what this one is; the same flag with two values is a mistake."""
    name = f"--{role.value}-engine-args"
    common = _flags("--engine-args", arguments.engine_args)
    own = _flags(name, getattr(arguments, f"{role.value}_engine_args"))
    for flag in sorted(common.keys() & own.keys()):
        if common[flag] != own[flag]:
            raise SettingsError(
                f"{flag} is {common[flag]!r} in --engine-args and {own[flag]!r} in {name}: leave one out"
            )
    return common | own


def _flags(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{name} must be a JSON object of SGLang flags by name")
    return value
