"""What runs on a cluster took, kept as JSON beside the tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kllm.bench.machine import machine_facts

FOLDER = Path(__file__).parent / "results"


class Result:
    """Seconds per step, and figures, of one proof."""

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}
        self._figures: dict[str, Any] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done in the context."""
        began = time.monotonic()
        yield
        self._steps[name] = round(time.monotonic() - began, 2)

    def note(self, name: str, figure: Any) -> None:
        """Keep one figure."""
        self._figures[name] = figure

    def document(self) -> dict[str, Any]:
        """What is written."""
        return {"machine": machine_facts(), "seconds": self._steps, **self._figures}


@contextmanager
def result(name: str) -> Iterator[Result]:
    """A result that is written to its file when all went well."""
    made = Result()
    yield made
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(made.document(), indent=1) + "\n")
