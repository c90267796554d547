"""Recorded requests from a file: Mooncake JSON lines, Azure 2023 CSV or ServeGen CSV, plain or gzipped."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from kllm.bench.lengths import MAX_TOKENS
from kllm.textfile import UNREADABLE, LineError, lines_of

MAX_ROWS = 1_000_000
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SERVEGEN = ("timestamp", "input_length", "output_length")


class TraceError(ValueError):
    """The file is no trace; the text says where and why."""


@dataclass(frozen=True)
class Recorded:
    """One request of a trace.

    Attributes:
        at: seconds.
        blocks: ids of the prompt's blocks of 512 tokens, where the trace has them; equal ids begin equal prompts.
        line: of the file, for messages.
    """

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    line: int = field(default=0, compare=False)


def read_trace(path: Path, *, limit: int | None = None, ordered: bool = False) -> list[Recorded]:
    """Requests sorted by time, which begins at 0; at most `limit` of those that stand first in the file.

    Args:
        path: plain or gzipped.
        limit: None takes all.
        ordered: refuse a file whose times run backwards, instead of sorting it.

    Raises:
        TraceError: the file cannot be read, or holds something else.
    """
    try:
        with lines_of(path) as lines:
            return parse_trace(lines, limit=limit, ordered=ordered)
    except (TraceError, LineError) as error:
        raise TraceError(f"{path}: {error}") from error
    except (*UNREADABLE, csv.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def parse_trace(lines: Iterable[str], *, limit: int | None = None, ordered: bool = False) -> list[Recorded]:
    """The same from lines.

    Raises:
        TraceError: they are no trace.
    """
    lines = iter(lines)
    first = next(lines, "")
    if not first:
        raise TraceError("it is empty")
    is_mooncake = first.lstrip().startswith("{")
    rows = _mooncake(itertools.chain([first], lines)) if is_mooncake else _table(first, lines)
    rows = _forwards(rows) if ordered else rows
    recorded = list(itertools.islice(rows, MAX_ROWS + 1 if limit is None else limit))
    if not recorded:
        raise TraceError("it holds no requests")
    if len(recorded) > MAX_ROWS:
        raise TraceError(f"it holds more than {MAX_ROWS} requests; take fewer with --limit")
    recorded.sort(key=lambda request: request.at)
    if is_mooncake:
        recorded = spread(recorded)
    begin = recorded[0].at
    return [replace(request, at=request.at - begin) for request in recorded]


def spread(recorded: list[Recorded]) -> list[Recorded]:
    """Spread requests of one time evenly over its bin, as wide as the smallest gap between two times.

    Mooncake rounds its times to 3 s; sent as they stand, its requests would come in volleys that never were.
    """
    times = sorted({request.at for request in recorded})
    width = min((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
    result: list[Recorded] = []
    for at, group in itertools.groupby(recorded, key=lambda request: request.at):
        same = list(group)
        result += [replace(request, at=at + width * index / len(same)) for index, request in enumerate(same)]
    return result


def _mooncake(lines: Iterable[str]) -> Iterator[Recorded]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(abs(int(block)) for block in row.get("hash_ids", ()))
            tokens = row["input_length"], row["output_length"]
            yield _recorded(float(row["timestamp"]) / 1000, *tokens, blocks=blocks, line=number)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TraceError(f"line {number} is no Mooncake request: {error!r}") from error


def _forwards(rows: Iterable[Recorded]) -> Iterator[Recorded]:
    before = None
    for row in rows:
        if before is not None and row.at < before.at:
            raise TraceError(
                f"line {row.line}: time runs backwards, by {before.at - row.at:g} s from line {before.line}; sort it"
            )
        before = row
        yield row


def _table(header: str, lines: Iterator[str]) -> Iterator[Recorded]:
    columns = [name.strip() for name in header.lstrip("\ufeff").strip().split(",")]
    names = next((names for names in (_AZURE, _SERVEGEN) if set(names) <= set(columns)), None)
    if names is None:
        raise TraceError(
            f"line 1 is neither a JSON object nor a header with {', '.join(_AZURE)} or {', '.join(_SERVEGEN)}"
        )
    if doubled := next((name for name in names if columns.count(name) > 1), None):
        raise TraceError(f"line 1 has several columns {doubled}; leave one")
    time_of = _azure_time if names is _AZURE else float
    places = [columns.index(name) for name in names]
    for number, row in enumerate(csv.reader(lines), start=2):
        if not row:
            continue
        try:
            at, input_tokens, output_tokens = _cells(row, places, columns=len(columns))
            yield _recorded(time_of(at), input_tokens, output_tokens, line=number)
        except ValueError as error:
            raise TraceError(f"line {number} is no request: {error!r}") from error


def _cells(row: list[str], places: list[int], *, columns: int) -> list[str]:
    if len(row) != columns:
        raise ValueError(f"{len(row)} columns, and the header has {columns}")
    return [row[place] for place in places]


def _recorded(
    at: float, input_tokens: str | int, output_tokens: str | int, *, blocks: tuple[int, ...] = (), line: int
) -> Recorded:
    if not math.isfinite(at):
        raise ValueError("its time is no number")
    tokens = _count(input_tokens), _count(output_tokens)
    if max(tokens) > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    if min(tokens) < 0:
        raise ValueError(f"a negative number of tokens, {min(tokens)}")
    # An answer without a token cannot be asked for; the smallest request stands for an empty one.
    return Recorded(at, max(1, tokens[0]), max(1, tokens[1]), blocks, line)


def _count(value: str | float) -> int:
    count = int(value)
    if isinstance(value, bool) or (isinstance(value, float) and value != count):
        raise ValueError(f"{value!r} is no number of tokens")
    return count


def _azure_time(text: str) -> float:
    # Some copies name a zone, and the difference of two times is all that counts.
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
