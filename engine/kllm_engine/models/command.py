"""`kllm-engine model URI --cache DIR`: JSON lines of progress, at last the path."""

from __future__ import annotations

import argparse
import json
import sys

from kllm_core.models.exceptions import ModelError
from kllm_core.models.link import link_folder
from kllm_core.termination import tell_why
from kllm_engine.models.resolve import resolve


def run(arguments: argparse.Namespace) -> int:
    """Make `arguments.uri` available in `arguments.cache`, and `arguments.link` a link to it if that is set.

    Prints {"event":"progress","message":...} while it works, then {"event":"model","path":...}, or
    {"event":"failed","reason":...,"message":...}. A container's termination message is then `REASON: MESSAGE`.

    Returns:
        0, or the exit code of what went wrong; see `kllm_core.models.exceptions`.
    """
    try:
        path = resolve(arguments.uri, arguments.cache, lambda message: _print("progress", message=message))
        if arguments.link is not None:
            link_folder(arguments.link, path)
    except ModelError as error:
        message = " ".join(str(error).split())
        _print("failed", reason=error.reason, message=message)
        tell_why(f"{error.reason}: {message}")
        sys.stderr.write(f"kllm-engine: {error.reason}: {message}\n")
        return error.exit_code
    _print("model", path=str(path))
    return 0


def _print(event: str, **fields: str) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
