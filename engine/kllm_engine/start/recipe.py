"""What the zygote imports once, and what a forked server then runs."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, Protocol

from kllm_engine.sglang.arguments import detect_device, import_environment
from kllm_engine.start.gpu import Probe, StandIns, refuse_if_touched

_MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "xgrammar",
)
_MODULES_IF_INSTALLED = ("sglang.srt.disaggregation.mooncake.conn",)
_MODULES_ON_A_GPU = ("sglang.srt.layers.attention.triton_backend",)


class Recipe(Protocol):
    """How a zygote prepares and what its children do."""

    def prepare(self) -> None:
        """Import what all servers need; runs once, in the zygote, before the first fork."""
        ...

    def run(self, arguments: list[str]) -> None:
        """Be a server; runs in a forked child until the server ends."""
        ...


class SglangRecipe:
    """SGLang servers on this machine's device.

    Args:
        model: path of the model that all servers will load; its tokenizer is loaded with the imports. None: not known.
    """

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def prepare(self) -> None:
        """Import SGLang with everything that a server of either role uses.

        Raises:
            GpuError: no GPU answers, or an import has touched CUDA, which forked servers could then not use.
        """
        device = detect_device()
        on_a_gpu = device == "cuda"
        # Imports read these: OpenMP sizes its pool and SGLang chooses its code paths at import time.
        for name, value in import_environment(device).items():
            os.environ.setdefault(name, value)
        # Reading takes seconds, as long as the import of torch that is needed for it in both processes.
        probe = Probe() if on_a_gpu else None
        if not on_a_gpu:
            stubs = str(Path(__file__).parent.parent / "cpu" / "stubs")
            if stubs not in sys.path:
                sys.path.insert(0, stubs)
        # Imports allocate much and free little: the collector would take a third of their time.
        gc.disable()
        if probe is not None:
            torch, triton_check = map(importlib.import_module, ("torch", "torch.utils._triton"))
            StandIns(probe.devices()).install(torch, triton_check)
        for module in (*_MODULES, *(_MODULES_ON_A_GPU if on_a_gpu else ())):
            importlib.import_module(module)
        for module in _MODULES_IF_INSTALLED:
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
        # Hooking takes half a second in each process, and children inherit it.
        importlib.import_module("sglang.srt.plugins").load_plugins()
        if self._model is not None:
            defaults = importlib.import_module("sglang.srt.server_args").ServerArgs
            importlib.import_module("kllm_engine.sglang.tokenizers").try_to_load(self._model, defaults)
        _always_fork()
        # What lives now is never looked at again, so that its pages stay shared with the children.
        gc.freeze()
        gc.enable()
        if on_a_gpu:
            refuse_if_touched(importlib.import_module("torch"))

    def run(self, arguments: list[str]) -> None:
        """Run one SGLang HTTP server with its scheduler and detokeniser processes."""
        server_arguments = importlib.import_module("sglang.srt.server_args").prepare_server_args(arguments)
        importlib.import_module("kllm_engine.sglang.tokenizers").load_before_fork(
            server_arguments.tokenizer_path or server_arguments.model_path, server_arguments
        )
        importlib.import_module("sglang.launch_server").run_server(server_arguments)


def _always_fork() -> None:
    """SGLang asks for `spawn`, which would import everything again in each of its processes."""
    original = multiprocessing.set_start_method

    def set_start_method(_method: str | None = None, force: bool = False) -> None:  # noqa: ARG001
        original("fork", force=True)

    module: Any = multiprocessing
    module.set_start_method = set_start_method
    original("fork", force=True)
