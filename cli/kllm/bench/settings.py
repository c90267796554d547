"""What a benchmark is asked to do, and whether that makes sense."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kllm.bench.arrivals import Arrivals, arrivals
from kllm.bench.attainment import Goals
from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_file
from kllm.bench.lengths import Lengths, parse_lengths
from kllm.bench.plan import Planned, generators, plan_of_arrivals, plan_of_trace
from kllm.bench.plot import check_plot
from kllm.bench.trace import TraceError, read_trace

MAX_REQUESTS = 1_000_000
_DEFAULT_ISL = "512"
_DEFAULT_OSL = "128"


@dataclass(frozen=True)
class Settings:
    """Options of `kllm bench`, as they were typed; None was left out.

    Attributes:
        url: None is still to be found.
        drain: seconds to wait for answers after the last request; None is the timeout.
        warmup: requests sent one after another before the load.
    """

    rate: float | None = None
    duration: float | None = None
    arrivals: Arrivals = Arrivals.POISSON
    trace: Path | None = None
    speed: float | None = None
    limit: int | None = None
    isl: str | None = None
    osl: str | None = None
    seed: int = 0
    url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    chat: bool = False
    ignore_eos: bool = True
    max_in_flight: int = 1024
    timeout: float = 120.0
    drain: float | None = None
    warmup: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    json: Path | None = None
    plot: Path | None = None

    @property
    def goals(self) -> Goals:
        """The objectives."""
        return Goals(self.ttft_ms, self.tpot_ms)

    @property
    def base_url(self) -> str:
        """The address without /v1."""
        return base_url(self.url or "")

    def check(self) -> None:
        """Find what is wrong before anything is sent or read.

        Raises:
            OptionError: an option is wrong.
        """
        for option, value in (
            ("--rate", self.rate), ("--duration", self.duration), ("--speed", self.speed), ("--timeout", self.timeout),
            ("--ttft-ms", self.ttft_ms), ("--tpot-ms", self.tpot_ms),
        ):  # fmt: skip
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(option, f"{value:g} must be a number above 0")
        if self.drain is not None and not (math.isfinite(self.drain) and self.drain >= 0):
            raise OptionError("--drain", f"{self.drain:g} must be 0 or more")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("--api-key", "it has characters that no header may have; check how it was copied")
        if self.url is not None:
            check_url(self.url)
        self._check_load()
        for option, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                check_file(option, path)
        if self.plot is not None:
            check_plot(self.plot)

    def plan(self) -> list[Planned]:
        """The requests to send.

        Raises:
            OptionError: there are none, or an option is wrong.
        """
        if self.trace is not None:
            return self._plan_of_trace(self.trace)
        for_arrivals, _, _ = generators(self.seed)
        times = arrivals(self.arrivals, rate=self.rate or 0.0, duration=self.duration or 0.0, rng=for_arrivals)
        if not times:
            raise OptionError("--duration", f"no request arrives within {self.duration:g} s; make it longer")
        inputs, outputs = _lengths("--isl", self.isl or _DEFAULT_ISL), _lengths("--osl", self.osl or _DEFAULT_OSL)
        return plan_of_arrivals(times, inputs=inputs, outputs=outputs, seed=self.seed)

    def document(self) -> dict[str, Any]:
        """For JSON, without the key."""
        values = {name: value for name, value in asdict(self).items() if name != "api_key"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def _plan_of_trace(self, path: Path) -> list[Planned]:
        inputs = None if self.isl is None else _lengths("--isl", self.isl)
        outputs = None if self.osl is None else _lengths("--osl", self.osl)
        try:
            recorded = read_trace(path, limit=self.limit)
        except TraceError as error:
            raise OptionError("--trace", str(error)) from error
        return plan_of_trace(
            recorded,
            speed=self.speed or 1.0,
            duration=self.duration or math.inf,
            inputs=inputs,
            outputs=outputs,
            seed=self.seed,
        )

    def _check_load(self) -> None:
        if (self.rate is None) == (self.trace is None):
            raise OptionError("--rate", "give either --rate R --duration S or --trace FILE")
        if self.trace is None:
            for option, value in (("--speed", self.speed), ("--limit", self.limit)):
                if value is not None:
                    raise OptionError(option, "it goes with --trace; leave it out")
            if self.duration is None:
                raise OptionError("--duration", "--rate needs it; give seconds")
            if (self.rate or 0.0) * self.duration > MAX_REQUESTS:
                raise OptionError("--duration", f"these are more than {MAX_REQUESTS} requests; lower it, or --rate")
        elif self.arrivals is not Arrivals.POISSON:
            raise OptionError("--arrivals", "a trace has its own; leave it out")


def base_url(url: str) -> str:
    """An address without /v1, and with a scheme."""
    base = url.strip().rstrip("/").removesuffix("/v1")
    return base if "://" in base else f"http://{base}"


def check_url(url: str) -> None:
    """See that an address is one.

    Raises:
        OptionError: it is none.
    """
    try:
        parts = urlsplit(base_url(url))
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise OptionError("--url", f"{url!r} is no address; use http://HOST:PORT or https://HOST")


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise OptionError(option, str(error)) from error
