"""Types of engines by name, and files that describe one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kllm_core.engine_model.spec import EngineSpec
from kllm_core.timing import PRIOR, DecodeTiming, EngineTiming, PrefillTiming

_MAXIMUM_BYTES = 1 << 20
_NOTES = "calibration"
"""A part of files that tells where the numbers come from, and that nothing reads."""

PRESETS: Mapping[str, EngineSpec] = {
    "prior": EngineSpec(PRIOR),
    "qwen3-8b-h200": EngineSpec(
        EngineTiming(PrefillTiming(4.491e-3, 1.941e-5, 6.149e-10), DecodeTiming(4.904e-3, 9.964e-6, 3.382e-8)),
        kv_tokens=730_000,
    ),
    "qwen3-32b-h200-tp2": EngineSpec(
        EngineTiming(PrefillTiming(8.000e-3, 4.734e-5, 1.122e-9), DecodeTiming(1.017e-2, 2.493e-5, 2.932e-8)),
        kv_tokens=700_000,
    ),
    "qwen3-235b-fp8-h200-tp8": EngineSpec(
        EngineTiming(PrefillTiming(1.820e-2, 2.765e-5, 8.272e-11), DecodeTiming(1.016e-2, 5.788e-5, 1.044e-8)),
        kv_tokens=1_900_000,
    ),
    "deepseek-v3-h200-tp8": EngineSpec(
        EngineTiming(PrefillTiming(2.495e-2, 3.980e-5, 1.420e-9), DecodeTiming(1.275e-2, 1.382e-4, 1.215e-7)),
        kv_tokens=550_000,
    ),
}
"""Timings are least-squares fits (`kllm.calibration.fit`, chunks of 8,192) to the grids of estimated kernels of
aiconfigurator 0.12.0 for SGLang on H200: within 6 % of them for the two dense models; for the other two prefill is
within 6 % and decode within 25 %. KV pools are what 88 % of the memory leaves beside the weights."""


class EngineError(ValueError):
    """There is no such engine, or its file is wrong; the text says what to write."""


def engine(name: str) -> EngineSpec:
    """The engine of a name, or that of a file.

    Raises:
        EngineError: it is neither.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix != ".json":
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}, or name a .json file"
        raise EngineError(f"there is no engine {name!r}; {hint}")
    try:
        if path.stat().st_size > _MAXIMUM_BYTES:
            raise EngineError(f"{path} is larger than {_MAXIMUM_BYTES} bytes")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    try:
        return parse_engine(text)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from error


def parse_engine(text: str) -> EngineSpec:
    """Read what `document` wrote; only `prefill` and `decode` must be there.

    Raises:
        EngineError: it is something else.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"it is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineError("it must be an object with prefill and decode")
    given = {name: value for name, value in document.items() if name != _NOTES}
    timing = {name: given.pop(name) for name in ("prefill", "decode") if name in given}
    _check_names(given, {field.name for field in fields(EngineSpec)} - {"timing"}, "")
    for name, kind in (("prefill", PrefillTiming), ("decode", DecodeTiming)):
        if isinstance(timing.get(name), dict):
            _check_names(timing[name], {field.name for field in fields(kind)}, f"{name}.")
    try:
        return TypeAdapter(EngineSpec).validate_python({**given, "timing": timing}, strict=False)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if part != "timing")
        message = problem["msg"].removeprefix("Value error, ")
        raise EngineError(f"{place}: {message}" if place else message) from error


def document(spec: EngineSpec, *, calibration: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """For a file.

    Args:
        spec: the engine.
        calibration: where the numbers come from, for its readers.
    """
    values = asdict(spec)
    timing = values.pop("timing")
    notes = {} if calibration is None else {_NOTES: dict(calibration)}
    return {**timing, **values, **notes}


def _check_names(given: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise EngineError(f"{prefix}{name}: unknown; {hint}")
