"""`kllm-router`: the OpenAI and gRPC frontend of one service."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence

import orjson
import structlog

from kllm_core.lifetime import die_with_parent
from kllm_core.logs import configure_logs
from kllm_router import arguments as command_line
from kllm_router.arguments import ArgumentError, Arguments
from kllm_router.discovery.exceptions import AccessError
from kllm_router.event_loop import PromptLoop
from kllm_router.frontend.tokenizer import ModelFilesError
from kllm_router.router import Router

TOKENIZER_COMMAND = "tokenizer"
_BAD_CONFIGURATION = 2

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `kllm-router`; exits with 0 after SIGTERM, 2 when it cannot be started as asked, 1 when it broke."""
    # Until the loop has its own handlers, being told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [TOKENIZER_COMMAND]:
        from kllm_router.tokenizer_command import run as run_tokenizer  # noqa: PLC0415

        sys.exit(run_tokenizer(argv[1:]))
    try:
        arguments = command_line.parse(argv)
        if arguments.parent_pid is not None:
            die_with_parent(arguments.parent_pid)
        configure_logs(getattr(logging, arguments.log_level.upper()))
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every call
        with asyncio.Runner(loop_factory=PromptLoop) as runner:
            code = runner.run(run(arguments, argv))
    except (ArgumentError, AccessError, ModelFilesError) as error:
        print(f"kllm-router: {error}", file=sys.stderr)  # noqa: T201  logs may not be set up yet
        sys.exit(_BAD_CONFIGURATION)
    sys.exit(code)


async def run(arguments: Arguments, argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT, by worker processes if several are wanted; `argv` is what they are started with.

    Raises:
        ArgumentError: an address cannot be had.
        AccessError: it is not known how to reach the API server.
        ModelFilesError: the tokenizer's folder cannot be used.
    """
    if arguments.workers > 1 and arguments.worker is None:
        # Only the process that starts workers needs it.
        from kllm_router.supervisor import supervise  # noqa: PLC0415

        return await supervise(arguments, argv)
    router = Router(arguments)
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # The second one ends what the first one lets finish.
        loop.add_signal_handler(number, _next, stop, now)
    try:
        event = await router.start()
        # What is loaded by now stays; walking it again and again would only stall streams.
        gc.collect()
        gc.freeze()
        _announce(event, arguments)
        return await router.serve(stop, now)
    finally:
        await router.close()


def _announce(event: dict[str, str], arguments: Arguments) -> None:
    """Tell the process that started this one where it listens."""
    line = orjson.dumps(event).decode()
    if arguments.worker is None:
        print(line, flush=True)  # noqa: T201
    else:
        with open(arguments.worker.ready, "w", encoding="utf-8") as pipe:  # noqa: PTH123  a descriptor has no path
            pipe.write(line + "\n")


def _next(first: asyncio.Event, second: asyncio.Event) -> None:
    (second if first.is_set() else first).set()


if __name__ == "__main__":
    main()
