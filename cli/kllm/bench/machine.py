"""Facts of the machine that sent the load, for a reader of its results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from pathlib import Path

from kllm.bench.exceptions import OptionError

_SPARE_FILES = 128


def machine_facts() -> dict[str, object]:
    """System, processor, memory and versions."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "kllm": importlib.metadata.version("kllm"),
    }


def allow_connections(count: int) -> None:
    """Let this process open so many connections.

    Raises:
        OptionError: it may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = max(1, hard - _SPARE_FILES)
        raise OptionError("--max-in-flight", f"this process may open {most} connections; ask for fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
