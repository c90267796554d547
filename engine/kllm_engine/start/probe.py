"""A short-lived process that reads the facts of all GPUs and prints them as one line of JSON, a list by index."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def facts(properties: Any) -> dict[str, bool | int | float | str]:
    """What torch's device properties say, as far as JSON can carry it."""
    values = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def main() -> None:
    """Print the facts; CUDA ends with this process."""
    cuda = importlib.import_module("torch").cuda
    devices = [facts(cuda.get_device_properties(index)) for index in range(cuda.device_count())]
    sys.stdout.write(json.dumps(devices) + "\n")


if __name__ == "__main__":
    main()
