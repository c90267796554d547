"""The access log: a line of JSON for each answer, without anything of prompts and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
import structlog

if TYPE_CHECKING:
    from kllm_router.interfaces import RequestSummary

STANDARD_OUTPUT = "-"
_MOST_LINES = 20_000
"""That wait to be written; above it they are dropped and counted."""

_log = structlog.get_logger(__name__)


class AccessLog:
    """Gathers lines, and writes them in a thread when told to: a slow disk or pipe must not stop streams.

    Args:
        path: of the file, which is opened anew for each write, so that it can be moved away; `-` is standard output.
        on_drop: told how many lines were lost.
    """

    def __init__(self, path: str, *, on_drop: Callable[[int], None]) -> None:
        self._path = path
        self._on_drop = on_drop
        self._lines: list[bytes] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="access-log")
        self._writing: Future[None] | None = None
        self._problem = ""

    def add(self, entry: dict[str, Any]) -> None:
        """Log one answer."""
        if len(self._lines) >= _MOST_LINES:
            self._on_drop(1)
        else:
            self._lines.append(orjson.dumps(entry, default=str))

    def flush(self) -> None:
        """Begin to write what was gathered, unless the last write still runs."""
        if not self._lines or (self._writing is not None and not self._writing.done()):
            return
        lines, self._lines = self._lines, []
        self._writing = self._pool.submit(self._write, lines)

    def close(self) -> None:
        """Write what is left."""
        self._pool.shutdown(wait=True)
        if self._lines:
            lines, self._lines = self._lines, []
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        data = b"\n".join(lines) + b"\n"
        try:
            if self._path == STANDARD_OUTPUT:
                _write_all(sys.stdout.buffer, data)
            else:
                with Path(self._path).open("ab") as file:
                    _write_all(file, data)
        except OSError as error:
            self._on_drop(len(lines))
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("the access log cannot be written", path=self._path, reason=self._problem)
        else:
            self._problem = ""


def entry(
    *,
    request_id: str,
    method: str,
    path: str,
    status: int,
    seconds: float,
    client: str,
    key: str,
    trace_id: str,
    summary: RequestSummary | None,
) -> dict[str, Any]:
    """What is logged of one answer; what is unknown or empty is left out.

    Args:
        request_id: that the client was told.
        method: of HTTP, or gRPC.
        path: without its query.
        status: 499 when the client left.
        seconds: from the end of its head to its end.
        client: address that it came from.
        key: name of its API key.
        trace_id: of its trace context.
        summary: of what was paired.
    """
    known: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": request_id,
        "trace_id": trace_id,
        "client": client,
        "key": key,
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    if summary is not None:
        usage, times = summary.usage, summary.times
        known |= {
            "rid": summary.rid,
            "stage": summary.stage,
            "prefill": summary.prefill_instance,
            "decode": summary.decode_instance,
            "attempts": summary.attempts,
            "continuations": summary.continuations,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "ttft_seconds": _rounded(times.first_token),
            "tpot_seconds": _rounded(times.per_output_token),
        }
    return {name: value for name, value in known.items() if value is not None and value != ""}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
