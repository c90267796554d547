"""What a calibration is asked for on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_file
from kllm.bench.settings import base_url, check_url
from kllm.calibration.probe import Plan
from kllm.finding import address_of_the_one, find
from kllm.rows import look
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role

_MOST_TOKENS = 1_000_000
_MOST_BATCH = 4096


@dataclass(frozen=True)
class Settings:
    """Options of `kllm calibrate`, as they were typed; None was left out."""

    url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    lengths: str = "128,512,1024,2048,4096"
    batches: str = "1,2,4,8,16,32"
    answer_tokens: int = 64
    repeats: int = 3
    chunk_tokens: int = 8192
    kv_tokens: int | None = None
    timeout: float = 120.0
    seed: int = 0
    out: Path | None = None

    def plan(self) -> Plan:
        """What is measured.

        Raises:
            OptionError: an option is wrong.
        """
        lengths = _numbers("--lengths", self.lengths, most=_MOST_TOKENS)
        batches = _numbers("--batches", self.batches, most=_MOST_BATCH)
        if len(lengths) < 3:
            raise OptionError("--lengths", "prefill has three coefficients; give at least three lengths")
        if len(batches) < 2:
            raise OptionError("--batches", "a decode step depends on its batch; give at least two")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise OptionError("--timeout", f"{self.timeout:g} must be a number above 0")
        if self.out is not None:
            check_file("--out", self.out)
        return Plan(lengths, batches, self.answer_tokens, self.repeats)

    def with_address(self) -> Settings:
        """With a base address; that of the service that is up, if none was given.

        Raises:
            OptionError: there is none, or it has several engines of a role, so that batches would be spread.
        """
        if self.url is not None:
            check_url(self.url)
            return replace(self, url=base_url(self.url))
        url, problem = address_of_the_one()
        if url is None:
            raise OptionError("--url", problem)
        rows = look(find().up[0]).rows
        for role in Role:
            serving = sum(row.role == role and row.state == InstanceState.SERVING for row in rows)
            if serving > 1:
                raise OptionError(
                    "--url", f"{serving} {role} instances serve, over which batches would be spread; calibrate a "
                    "service with one of each"
                )  # fmt: skip
        return replace(self, url=url)


def _numbers(option: str, text: str, *, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) if part.isdecimal() else 0 for part in parts]
    if not all(1 <= number <= most for number in numbers):
        raise OptionError(option, f"{text!r} must be whole numbers from 1 to {most} with commas between them")
    return tuple(sorted(set(numbers)))
