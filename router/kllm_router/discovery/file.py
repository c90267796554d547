"""Instances of a service on one machine, from the file that the process substrate writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import structlog

from kllm_core.objectives import Role
from kllm_router.discovery.instances import DiscoveredInstance

_VERSION = 1
_MAX_BYTES = 16 * 1024 * 1024

_log = structlog.get_logger(__name__)


class FleetFileError(ValueError):
    """The file is not a fleet file of this version."""


def parse_fleet_file(data: bytes) -> list[DiscoveredInstance]:
    """Read the instances of a fleet file.

    Raises:
        FleetFileError: it is incomplete or of another form; the message names the field.
    """
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FleetFileError(f"not JSON: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("version") != _VERSION:
        raise FleetFileError(f"version must be {_VERSION}")
    entries = parsed.get("instances")
    if not isinstance(entries, list):
        raise FleetFileError("instances must be a list")
    instances = [_instance(entry, f"instances[{i}]") for i, entry in enumerate(entries)]
    if len({instance.id for instance in instances}) != len(instances):
        raise FleetFileError("instances: an id appears twice")
    return instances


async def watch_fleet_file(path: Path, *, poll_seconds: float = 0.2) -> AsyncIterator[list[DiscoveredInstance]]:
    """Yield the instances at once, and again after each change.

    A file that is missing, half-written or wrong changes nothing: the last good one stays in force.
    """
    seen: tuple[int, int, int] | None = None
    current: list[DiscoveredInstance] | None = None
    problem = ""
    while True:
        try:
            stamp = _stamp(path)
            if stamp != seen:
                instances = parse_fleet_file(_read(path))
                seen, problem = stamp, ""
                if instances != current:
                    current = instances
                    yield instances
        except (OSError, FleetFileError) as error:
            if str(error) != problem:
                problem = str(error)
                _log.warning("fleet file cannot be used, the last good one stays", path=str(path), reason=problem)
        await asyncio.sleep(poll_seconds)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_BYTES:
            raise FleetFileError(f"has {size} bytes, at most {_MAX_BYTES} are read")
        return file.read(_MAX_BYTES)


def _instance(entry: Any, where: str) -> DiscoveredInstance:
    if not isinstance(entry, dict):
        raise FleetFileError(f"{where} must be an object")
    for name in ("id", "role", "agent"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise FleetFileError(f"{where}.{name} must be text")
    if entry["role"] not in set(Role):
        raise FleetFileError(f"{where}.role must be prefill or decode, not {entry['role']!r}")
    return DiscoveredInstance(entry["id"], Role(entry["role"]), entry["agent"])
