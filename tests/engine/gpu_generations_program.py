"""Says what a zygote, a server forked from it, and a scheduler forked from that are answered."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

from kllm_engine.start.gpu import StandIns


def in_child(work: Callable[[], dict]) -> dict:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = json.load(told)
    os.wait()
    return answer


def main() -> None:
    cuda = SimpleNamespace(get_device_properties=lambda: "real", current_device=lambda: "real")
    device = SimpleNamespace(major=9)
    StandIns([device]).install(SimpleNamespace(cuda=cuda), SimpleNamespace(has_triton=lambda: "real"))

    def server() -> dict:
        return {"server": cuda.current_device(), **in_child(lambda: {"scheduler": cuda.current_device()})}

    sys.stdout.write(json.dumps({"zygote": cuda.current_device(), **in_child(server)}))


if __name__ == "__main__":
    main()
