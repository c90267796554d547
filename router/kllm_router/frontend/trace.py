"""W3C trace context of clients: checked, and passed on as it is, since the router has no spans of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,100})?")
_STATE = re.compile(r"[!-~][ -~]{0,511}")
_FIRST_VERSION = "00-"
_FIRST_LENGTH = 55


class Trace(NamedTuple):
    """A trace that a request belongs to.

    Attributes:
        trace_id: 32 hex digits; empty without a trace.
        lines: headers for engines, each with its end.
    """

    trace_id: str = ""
    lines: str = ""


NO_TRACE = Trace()


def read_trace(headers: Mapping[str, str]) -> Trace:
    """The trace in headers, by lower-case name. One that is not valid is left out, as the standard asks."""
    parent = headers.get("traceparent")
    if parent is None:
        return NO_TRACE
    found = _PARENT.fullmatch(parent)
    if found is None or (parent.startswith(_FIRST_VERSION) and len(parent) != _FIRST_LENGTH):
        return NO_TRACE
    lines = f"traceparent: {parent}\r\n"
    state = headers.get("tracestate", "")
    if _STATE.fullmatch(state):
        lines += f"tracestate: {state}\r\n"
    return Trace(found.group(1), lines)
