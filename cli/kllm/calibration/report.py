"""What a calibration found, as text and for a file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kllm.calibration.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill, prefill_seconds
from kllm_core.timing import EngineTiming

Point = TypeVar("Point")


@dataclass(frozen=True)
class Calibrated:
    """A fitted timing and what it was fitted to.

    Attributes:
        chunk_tokens: of one prefill step.
    """

    timing: EngineTiming
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    chunk_tokens: int

    @classmethod
    def of(cls, prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint], *, chunk_tokens: int) -> Calibrated:
        """Fit.

        Raises:
            FitError: the measurements do not tell the coefficients apart.
        """
        timing = EngineTiming(fit_prefill(prefill, chunk_tokens=chunk_tokens), fit_decode(decode))
        return cls(timing, tuple(prefill), tuple(decode), chunk_tokens)

    @property
    def residuals(self) -> tuple[list[float], list[float]]:
        """By how much the model is above each measurement of prefill and of decode, as a part of it."""
        prefill = [
            prefill_seconds(self.timing.prefill, each.tokens, chunk_tokens=self.chunk_tokens) / each.seconds - 1
            for each in self.prefill
        ]
        decode = [self.timing.decode.seconds(each.batch, each.kv_tokens) / each.seconds - 1 for each in self.decode]
        return prefill, decode

    def notes(self, *, model: str, address: str) -> dict[str, Any]:
        """Where the numbers come from, for the file."""
        prefill, decode = self.residuals
        return {
            "model": model,
            "address": address,
            "prefill": [{**asdict(each), "residual": round(off, 4)} for each, off in _with(self.prefill, prefill)],
            "decode": [{**asdict(each), "residual": round(off, 4)} for each, off in _with(self.decode, decode)],
        }

    def text(self) -> str:
        """For people."""
        prefill, decode = self.residuals
        p, d = self.timing.prefill, self.timing.decode
        lines = [f"{'prefill tokens':>16}{'measured ms':>14}{'model ms':>12}{'off':>8}"]
        lines += [
            f"{each.tokens:>16}{each.seconds * 1000:>14.1f}{each.seconds * (1 + off) * 1000:>12.1f}{off:>8.1%}"
            for each, off in _with(self.prefill, prefill)
        ]
        lines += ["", f"{'batch':>7}{'KV tokens':>12}{'measured ms':>14}{'model ms':>12}{'off':>8}"]
        lines += [
            f"{each.batch:>7}{each.kv_tokens:>12}{each.seconds * 1000:>14.2f}"
            f"{each.seconds * (1 + off) * 1000:>12.2f}{off:>8.1%}"
            for each, off in _with(self.decode, decode)
        ]
        return "\n".join(
            [
                *lines,
                "",
                f"prefill {p.a:.4g} s + {p.b:.4g} s·n + {p.k:.4g} s·n·(n + 2·cached), {_worst(prefill)}",
                f"decode  {d.a:.4g} s + {d.b:.4g} s·batch + {d.c:.4g} s·KV tokens, {_worst(decode)}",
            ]
        )


def _with(points: Sequence[Point], residuals: Sequence[float]) -> list[tuple[Point, float]]:
    return list(zip(points, residuals, strict=True))


def _worst(residuals: Sequence[float]) -> str:
    mean = sum(map(abs, residuals)) / len(residuals)
    return f"off by {mean:.1%} in the mean and {max(map(abs, residuals)):.1%} at most"
