"""A zygote answers for its GPUs without touching them, and its servers' schedulers ask the real functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kllm_engine.start.gpu import GpuError, Probe, StandIns, refuse_if_touched
from kllm_engine.start.probe import facts

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
OLD = SimpleNamespace(name="Tesla P100", major=6, minor=0, multi_processor_count=56)
GENERATIONS = Path(__file__).with_name("gpu_generations_program.py")


def real(name):
    def function(*arguments, **named):
        """Initialises CUDA."""
        return ("real", name, arguments, named)

    return function


def torch_with(*devices):
    """A torch whose functions are replaced, its check for Triton, and the replacements."""
    torch = SimpleNamespace(
        cuda=SimpleNamespace(get_device_properties=real("get_device_properties"), current_device=real("current_device"))
    )
    triton_check = SimpleNamespace(has_triton=real("has_triton"))
    stand_ins = StandIns(devices)
    stand_ins.replace(torch, triton_check)
    return torch, triton_check, stand_ins


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", SimpleNamespace(index=None), SimpleNamespace(index=0)])
def test_properties_come_from_the_facts_however_the_device_is_named(device):
    torch, _, _ = torch_with(H200, OLD)
    assert torch.cuda.get_device_properties(device) is H200


@pytest.mark.parametrize("device", [1, "cuda:1", SimpleNamespace(index=1)])
def test_a_second_device_has_its_own_facts(device):
    torch, _, _ = torch_with(H200, OLD)
    assert torch.cuda.get_device_properties(device) is OLD
    assert torch.cuda.current_device() == 0


def test_a_device_that_is_not_there_is_refused():
    torch, _, _ = torch_with(H200)
    with pytest.raises(GpuError, match="no GPU 1; there are 1"):
        torch.cuda.get_device_properties(1)


@pytest.mark.parametrize(("device", "usable"), [(H200, True), (OLD, False)])
def test_triton_is_there_from_volta_on(device, usable):
    _, triton_check, _ = torch_with(device)
    assert triton_check.has_triton() is usable


def test_a_server_that_still_forks_gets_facts_and_its_children_the_real_functions_also_through_copies():
    torch, triton_check, stand_ins = torch_with(H200)
    copied = torch.cuda.get_device_properties
    stand_ins.forked()
    assert copied("cuda") is H200
    stand_ins.forked()
    assert copied("cuda", exact=True) == ("real", "get_device_properties", ("cuda",), {"exact": True})
    assert torch.cuda.current_device()[:2] == ("real", "current_device")
    assert triton_check.has_triton()[:2] == ("real", "has_triton")


def test_each_fork_is_counted_in_the_child_only():
    told = subprocess.run([sys.executable, str(GENERATIONS)], capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(told.stdout) == {"zygote": 0, "server": 0, "scheduler": "real"}


def test_facts_leave_out_what_json_cannot_carry():
    properties = SimpleNamespace(name="GPU", major=9, total_memory=5, integrated=False, uuid=object(), _private=1)
    assert facts(properties) == {"name": "GPU", "major": 9, "total_memory": 5, "integrated": False}


def probe(code: str) -> Probe:
    return Probe([sys.executable, "-c", code])


def test_the_probe_tells_the_facts_of_every_device():
    devices = probe("""print('[{"name": "A", "major": 9}, {"name": "B", "major": 8}]')""").devices()
    assert [(device.name, device.major) for device in devices] == [("A", 9), ("B", 8)]


def test_a_probe_that_fails_says_so():
    with pytest.raises(GpuError, match="exit status 3"):
        probe("raise SystemExit(3)").devices()


def test_no_visible_device_is_an_error():
    with pytest.raises(GpuError, match="torch sees none"):
        probe("print('[]')").devices()


def test_a_gpu_that_does_not_answer_is_given_up():
    hanging = probe("import time; time.sleep(60)")
    with pytest.raises(GpuError, match="did not answer within 0 s"):
        hanging.devices(timeout=0.2)
    assert hanging.returncode is not None


def touched(*, initialised: bool, bad_fork: bool):
    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: initialised),
        _C=SimpleNamespace(_cuda_isInBadFork=lambda: bad_fork and os.getpid() != PARENT),
    )


PARENT = os.getpid()


def test_an_untouched_gpu_is_accepted():
    refuse_if_touched(touched(initialised=False, bad_fork=False), lambda: 0)


def test_initialised_cuda_is_refused():
    with pytest.raises(GpuError, match="initialised CUDA"):
        refuse_if_touched(touched(initialised=True, bad_fork=False), lambda: 0)


def test_what_only_a_child_can_see_is_refused():
    with pytest.raises(GpuError, match="asked CUDA for its devices"):
        refuse_if_touched(touched(initialised=False, bad_fork=True), lambda: 0)


def test_a_driver_that_does_not_start_in_a_child_is_refused():
    with pytest.raises(GpuError, match="initialised the driver before"):
        refuse_if_touched(touched(initialised=False, bad_fork=False), lambda: 3)


def test_a_child_that_breaks_never_comes_back():
    def broken():
        raise OSError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(GpuError, match="cannot initialise CUDA"):
        refuse_if_touched(touched(initialised=False, bad_fork=False), broken)


def test_counting_devices_through_cuda_is_found_with_the_real_torch():
    code = """
import torch
from kllm_engine.start.gpu import GpuError, refuse_if_touched
refuse_if_touched(torch, lambda: 0)
torch._C._cuda_getDeviceCount()
try:
    refuse_if_touched(torch, lambda: 0)
except GpuError:
    print("found")
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout == "found\n"
