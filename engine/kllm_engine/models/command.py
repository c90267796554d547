"""`kllm-engine model URI --cache DIR`: JSON lines of progress, at last the path."""

from __future__ import annotations

import argparse
import json
import sys

from kllm_engine.models.exceptions import ModelError
from kllm_engine.models.resolve import resolve

_FAILED = 1


def run(arguments: argparse.Namespace) -> int:
    """Make `arguments.uri` available in `arguments.cache`.

    Prints {"event":"progress","message":...} while it works, then {"event":"model","path":...}, or
    {"event":"failed","message":...} and returns 1.
    """
    try:
        path = resolve(arguments.uri, arguments.cache, lambda message: _print("progress", message=message))
    except ModelError as error:
        _print("failed", message=str(error))
        sys.stderr.write(f"kllm-engine: {error}\n")
        return _FAILED
    _print("model", path=str(path))
    return 0


def _print(event: str, **fields: str) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
