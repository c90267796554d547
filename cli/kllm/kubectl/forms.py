"""Forms of output."""

from __future__ import annotations

import enum


class Output(enum.StrEnum):
    """What `-o` takes; without it, tables for people."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"
    NAME = "name"
