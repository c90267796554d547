"""Reads what options of a simulation are written as. Pure."""

from __future__ import annotations

import math

from kllm.bench.exceptions import OptionError
from kllm.sim.laws.base import Pool
from kllm.sim.scenario import Failure, Failures


def knobs_of(texts: tuple[str, ...], policy: str) -> dict[str, str]:
    """Settings of a policy: `NAME=VALUE` is for any, `POLICY.NAME=VALUE` for that one only.

    Raises:
        OptionError: one is something else.
    """
    values = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        owner, dot, rest = name.rpartition(".")
        if not (equals and rest and value):
            raise OptionError("--set", f"{text!r} must be NAME=VALUE or POLICY.NAME=VALUE")
        if not dot or owner == policy.partition(":")[0]:
            values[rest.replace("-", "_")] = value
    return values


def parse_failures(text: str) -> Failures:
    """Read `0.5,decode@600`: deaths per hour of each instance, and single ones.

    Raises:
        OptionError: it is something else.
    """
    per_hour, scripted = 0.0, []
    for part in text.split(","):
        name, at, seconds = part.strip().partition("@")
        try:
            if at:
                scripted.append(Failure(_above_zero(seconds), Pool(name)))
            else:
                per_hour += _above_zero(name)
        except ValueError as error:
            raise OptionError(
                "--failures", f"{part.strip()!r} must be deaths per hour of each instance, or POOL@SECONDS such as "
                "decode@600"
            ) from error  # fmt: skip
    return Failures(per_hour, tuple(sorted(scripted, key=lambda failure: failure.at)))


def parse_numbers(option: str, text: str, *, one_pool: bool) -> list[float]:
    """One number for one pool, or `PREFILL,DECODE`.

    Raises:
        OptionError: it is something else.
    """
    count = 1 if one_pool else 2
    try:
        values = [_above_zero(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != count:
        what = "one number" if one_pool else "two numbers, PREFILL,DECODE,"
        raise OptionError(option, f"{text!r} must be {what} of at least 0")
    return values


def parse_counts(option: str, text: str, *, one_pool: bool) -> list[int]:
    """The same in whole numbers.

    Raises:
        OptionError: it is something else.
    """
    values = parse_numbers(option, text, one_pool=one_pool)
    if any(value != int(value) for value in values):
        raise OptionError(option, f"{text!r} must be whole numbers")
    return [int(value) for value in values]


def parse_bounds(text: str) -> tuple[int, int]:
    """Read `3:8`.

    Raises:
        OptionError: it is something else.
    """
    least, colon, most = text.partition(":")
    if not (colon and least.strip().isdecimal() and most.strip().isdecimal() and int(least) <= int(most)):
        raise OptionError("--bounds", f"{text!r} must be LEAST:MOST instances, such as 3:8")
    return int(least), int(most)


def _above_zero(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def parse_policies(text: str) -> list[str]:
    """Read `slo,static:2,3,hpa`: a part that is a number belongs to the policy before it.

    Raises:
        OptionError: there is none, or one is there twice.
    """
    names: list[str] = []
    for part in (each.strip() for each in text.split(",")):
        if part.isdecimal() and names and ":" in names[-1]:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    if not names:
        raise OptionError("--policies", "name at least one, such as slo,hpa,static:2,3")
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise OptionError("--policies", f"{doubled} is there twice")
    return names
