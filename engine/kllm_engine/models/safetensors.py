"""Writing a safetensors file tensor by tensor, so that only one of them is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_FLOAT32_BYTES = 4


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[NDArray[np.float32]]) -> None:
    """Write float32 tensors.

    Args:
        path: the file to write.
        shapes: name and shape of each, in the order of `tensors`.
        tensors: their values, read one after another.

    Raises:
        ValueError: a tensor does not have its announced shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * _FLOAT32_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{path.name}: {name} has shape {tensor.shape}, {shape} was announced")
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
