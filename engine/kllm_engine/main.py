"""`kllm-engine`: the agent of one instance, the zygote that forks engines, and model preparation.

Each subcommand imports only what it needs: the agent neither torch nor sglang, the zygote no gRPC.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kllm_core.lifetime import die_with_parent
from kllm_core.logs import configure_logs
from kllm_core.termination import tell_why
from kllm_engine.workdir import use_work_dir

_BAD_ARGUMENTS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand and exit with its code: 0 good or stopped, 1 failed, 2 wrong arguments; `model` has more."""
    # Until a subcommand has its own handlers, being told to stop is no failure.
    signal.signal(signal.SIGTERM, _stop_quietly)
    arguments = _parser().parse_args(argv)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    configure_logs()
    if getattr(arguments, "work_dir", None) is not None:
        try:
            use_work_dir(arguments.work_dir)
        except OSError as error:
            sys.exit(_refuse(f"--work-dir {arguments.work_dir}: {error.strerror}"))
    sys.exit(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    from kllm_engine.agent.command import add_flags  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="kllm-engine", description=__doc__, allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")

    agent = subcommands.add_parser("agent", help="start one engine, watch it, and tell the fleet about it")
    add_flags(agent)
    agent.set_defaults(run=_agent)

    zygote = subcommands.add_parser("zygote", help="import the engine once and fork servers from it")
    zygote.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    zygote.add_argument("--model", help="path of a model whose tokenizer all servers will use")
    zygote.set_defaults(run=_zygote)

    model = subcommands.add_parser("model", help="make a model available and print its path")
    model.add_argument("uri", help="for example demo://tiny-random-llama")
    model.add_argument("--cache", type=Path, required=True, help="directory that keeps models")
    model.add_argument("--link", type=Path, help="make this a symbolic link to the model's folder")
    model.set_defaults(run=_model)

    for subcommand in (agent, model):
        subcommand.add_argument(
            "--work-dir", type=Path, help="where the engine and its libraries put what they write, home and caches"
        )
    for subcommand in (agent, zygote, model):
        subcommand.add_argument("--parent-pid", type=int, help="end when this process, the parent, ends")
    return parser


def _agent(arguments: argparse.Namespace) -> int:
    from kllm_engine.agent.command import run  # noqa: PLC0415
    from kllm_engine.agent.exceptions import SettingsError  # noqa: PLC0415

    try:
        return run(arguments)
    except SettingsError as error:
        return _refuse(str(error))


def _zygote(arguments: argparse.Namespace) -> int:
    from kllm_engine.start.zygote import serve  # noqa: PLC0415

    code = serve(arguments.socket, model=arguments.model)
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking a million imported objects apart takes a second, and nobody gains by it.
    os._exit(code)


def _model(arguments: argparse.Namespace) -> int:
    from kllm_engine.models.command import run  # noqa: PLC0415

    return run(arguments)


def _refuse(message: str) -> int:
    tell_why(message)
    sys.stderr.write(f"kllm-engine: {message}\n")
    return _BAD_ARGUMENTS


def _stop_quietly(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
