"""On a machine without a GPU, KV pages are laid out as the GPU kernels would."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kllm_engine.cpu
from kllm_engine.cpu.paging import Launchable, allocate_decode, allocate_extend


@pytest.fixture(scope="module")
def stub() -> ModuleType:
    path = Path(kllm_engine.cpu.__file__).parent / "stubs" / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("sgl_kernel_stub", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stub_writes_each_requests_locations_into_its_row(stub):
    table = torch.zeros(4, 8, dtype=torch.int32)
    stub.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 3]), torch.tensor([10, 11, 20, 21, 22])
    )
    assert table[2].tolist() == [0, 10, 11, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [20, 21, 22, 0, 0, 0, 0, 0]


def test_other_kernels_can_be_imported_but_not_called(stub):
    with pytest.raises(NotImplementedError, match="fused_moe"):
        stub.fused_moe(1)
    assert not hasattr(stub, "scalar_type")
    assert not hasattr(stub, "__wrapped__")


requests = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), min_size=1, max_size=6)


@given(requests, st.sampled_from([1, 2, 16]), st.randoms())
def test_new_tokens_fill_the_last_page_and_then_new_ones(batch, page, rng):
    """Each request's locations go on in its last page, are whole pages after it, and no location is given twice."""
    used = sum(-(-prefix // page) for prefix, _ in batch)
    needed = sum(-(-(prefix + new) // page) - -(-prefix // page) for prefix, new in batch)
    pages = list(range(1, 1 + used + needed + 2))
    rng.shuffle(pages)
    own = [[pages.pop() for _ in range(-(-prefix // page))] for prefix, _ in batch]
    last = [ids[-1] * page + (prefix - 1) % page if ids else -1 for ids, (prefix, _) in zip(own, batch, strict=True)]
    free = torch.tensor(pages)
    out = torch.full((sum(new for _, new in batch),), -7)
    prefixes = torch.tensor([prefix for prefix, _ in batch])
    lengths = torch.tensor([prefix + new for prefix, new in batch])
    Launchable(allocate_extend)[(len(batch),)](prefixes, lengths, torch.tensor(last), free, out, 8, page)

    expected, taken = [], 0
    for ids, (prefix, new) in zip(own, batch, strict=True):
        table = list(ids)
        for position in range(prefix, prefix + new):
            if position // page == len(table):
                table.append(pages[taken])
                taken += 1
            expected.append(table[position // page] * page + position % page)
    assert out.tolist() == expected
    assert taken == needed


def test_too_few_pages_raise_nothing():
    out = torch.zeros(40, dtype=torch.int64)
    allocate_extend(torch.tensor([0]), torch.tensor([40]), torch.tensor([-1]), torch.tensor([5]), out, 1, 16)
    few = torch.zeros(2, dtype=torch.int64)
    allocate_decode(torch.tensor([17, 33]), torch.tensor([15, 31]), torch.tensor([9]), few, 2, 16)


def test_a_decoded_token_starts_a_page_only_when_its_last_one_is_full():
    out = torch.zeros(3, dtype=torch.int64)
    lengths, last = torch.tensor([17, 18, 33]), torch.tensor([31, 48, 79])
    allocate_decode(lengths, last, torch.tensor([9, 4]), out, 4, 16)
    assert out.tolist() == [9 * 16, 49, 4 * 16]
