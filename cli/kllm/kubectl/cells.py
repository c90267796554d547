"""Table cells: times, loads and counts as kubectl's users know them."""

from __future__ import annotations

import datetime as dt

from kllm_core.kinds.status import LoadStatus, RoleStatus


def age(since: dt.datetime | None, now: dt.datetime) -> str:
    """Time passed, in one or two units."""
    if since is None:
        return "-"
    seconds = max(0, int((now - since).total_seconds()))
    for unit, size, below in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86_400}d"


def load(status: LoadStatus) -> str:
    """The load that decides; 1.00 is the boundary of the objective."""
    return milli(status.value_milli)


def milli(thousandths: int | None) -> str:
    """Thousandths with two places."""
    return "-" if thousandths is None else f"{thousandths / 1000:.2f}"


def counts(role: RoleStatus) -> str:
    """Ready of desired."""
    return f"{role.ready}/{role.desired}"


def seconds(milliseconds: int | None) -> str:
    """Milliseconds as seconds."""
    return "-" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def text(value: object) -> str:
    """Anything; what is unknown or empty is a dash."""
    return "-" if value is None or value == "" else str(value)


def kv_share(told: dict[str, object]) -> str:
    """Share of the KV cache that requests hold, of an engine's load."""
    used, total = told.get("kv_used_tokens"), told.get("kv_total_tokens")
    if not isinstance(used, int) or not isinstance(total, int) or not total:
        return "-"
    return f"{used / total:.0%}"
