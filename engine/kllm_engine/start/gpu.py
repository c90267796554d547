"""What a zygote knows of its GPUs without touching them.

While SGLang is imported it asks which GPU there is. Asking CUDA would initialise it, and no process that is forked
afterwards could use the GPU. So a short-lived process reads the facts, and they are the answers wherever a process has
yet to fork those who compute: in the zygote, and in the first process of each server.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

PROBE = (sys.executable, "-P", "-m", "kllm_engine.start.probe")

_PROBE_SECONDS = 120.0
_OLDEST_FOR_TRITON = 7
_BAD_FORK = 2
_FAILED = 3
_FORKS_WITHOUT_CUDA = 1
"""Below the zygote: a server's first process forks the schedulers, and only they may touch the GPU."""


class GpuError(RuntimeError):
    """The GPU cannot be used by forked servers; the message says why."""


class Probe:
    """A process that reads the facts, beside whatever its parent does meanwhile.

    Args:
        command: prints a JSON list with one object of device properties for each GPU.
    """

    def __init__(self, command: Sequence[str] = PROBE) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.returncode

    def devices(self, timeout: float = _PROBE_SECONDS) -> tuple[SimpleNamespace, ...]:
        """Properties of every GPU that this process may use, by index; waits for them.

        Args:
            timeout: in seconds.

        Raises:
            GpuError: there is none, or it does not answer.
        """
        try:
            output, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise GpuError(f"the GPU did not answer within {timeout:.0f} s: look at nvidia-smi") from None
        if self._process.returncode:
            raise GpuError(f"the GPU's facts could not be read, exit status {self._process.returncode}; see stderr")
        devices = tuple(SimpleNamespace(**facts) for facts in json.loads(output))
        if not devices:
            raise GpuError("there is a GPU, but torch sees none: check CUDA_VISIBLE_DEVICES and the driver's libraries")
        return devices


class StandIns:
    """Answers in the place of torch's functions that would initialise CUDA.

    Modules copy functions (`from torch.cuda import ...`), so that a stand-in itself calls the real one where CUDA may
    be used.

    Args:
        devices: properties by index.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices
        self._forks = 0

    def install(self, torch: Any, triton_check: Any) -> None:
        """Replace the functions, and follow from now on who is forked; see `replace`."""
        self.replace(torch, triton_check)
        os.register_at_fork(after_in_child=self.forked)

    def replace(self, torch: Any, triton_check: Any) -> None:
        """Replace the functions.

        Args:
            torch: the module.
            triton_check: torch's module with `has_triton`.
        """
        # Name and capability are read from the properties by torch itself.
        self._replace(torch.cuda, "get_device_properties", self._properties)
        self._replace(torch.cuda, "current_device", lambda: 0)
        # The real one imports the compiler, which takes seconds, and copies functions of torch.cuda.
        usable = any(device.major >= _OLDEST_FOR_TRITON for device in self._devices)
        self._replace(triton_check, "has_triton", lambda: usable)

    def forked(self) -> None:
        """This process is a child of the one in which the functions were replaced."""
        self._forks += 1

    def _replace(self, module: Any, name: str, answer: Callable[..., Any]) -> None:
        real = getattr(module, name)

        @functools.wraps(real)
        def stand_in(*arguments: Any, **named: Any) -> Any:
            if self._forks > _FORKS_WITHOUT_CUDA:
                return real(*arguments, **named)
            return answer(*arguments, **named)

        setattr(module, name, stand_in)

    def _properties(self, device: Any = None) -> Any:
        index = _index(device)
        if not 0 <= index < len(self._devices):
            raise GpuError(f"there is no GPU {index}; there are {len(self._devices)}")
        return self._devices[index]


def start_driver() -> int:
    """Initialise CUDA's driver in this process; its error code, 0 for success."""
    code: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
    return code


def refuse_if_touched(torch: Any, start: Callable[[], int] = start_driver) -> None:
    """Make sure that forked processes can use the GPU.

    Not everything that spoils it shows in the process that did it: counting devices through CUDA initialises nothing in
    torch's eyes, and a library may initialise the driver behind its back. So a child is forked to try.

    Args:
        torch: the module.
        start: initialises the driver, returns an error code.

    Raises:
        GpuError: they cannot.
    """
    if torch.cuda.is_initialized():
        raise GpuError("an import has initialised CUDA: forked servers could not use the GPU")
    child = os.fork()
    if child == 0:
        status = _FAILED
        try:
            status = _BAD_FORK if torch._C._cuda_isInBadFork() else _FAILED * bool(start())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == _BAD_FORK:
        raise GpuError("an import has asked CUDA for its devices: forked servers could not use the GPU")
    if code != 0:
        raise GpuError("a forked process cannot initialise CUDA: an import has initialised the driver before")


def _index(device: Any) -> int:
    """Which GPU: None is the current one; else a number, `cuda`, `cuda:1` or a torch.device."""
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        return int(device.partition(":")[2] or 0)
    return device.index or 0
