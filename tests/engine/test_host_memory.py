"""Host memory is exact, zeroed and present; it is page-locked then, and unlocked before it is given back."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rpft.engine import host_memory
from rpft.engine.host_memory import page_locked
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec, build_layouts
from rpft.model.pages import zeroed_pages

HUGE = 2 << 20
SIZES = [1, mmap.PAGESIZE, 2 * HUGE + mmap.PAGESIZE + 1]
SMAPS = Path("/proc/self/smaps")

needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps")


def present(address: int, num_bytes: int) -> list[bool] | None:
    """Whether each page is in memory; None where nothing is mapped."""
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    failed = mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages)
    return None if failed else [bool(page & 1) for page in pages]


def flags_of(address: int) -> list[str]:
    """What the system notes about the mapping at ``address``: hg huge pages asked for, dc not copied by a fork."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("not mapped")


class Runtime:
    """Stands in for the CUDA runtime and notes what it is asked, and what was in memory then."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []
        self.present: list[list[bool] | None] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.present.append(present(address, num_bytes))
        self.registered.append((address, num_bytes, flags))
        return self._code

    def cudaHostUnregister(self, address: int) -> None:
        self.present.append(present(address, 1))
        self.unregistered.append(address)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return pretend(monkeypatch, Runtime())


def pretend(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Runtime:
    monkeypatch.setattr(host_memory._PageLocking, "refused", False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_memory, "_forget_error", lambda: None)  # needs a device: tests/gpu
    return runtime


@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("allocate", [zeroed_pages, page_locked])
def test_memory_has_the_size_asked_for_and_is_zero(allocate, size: int, runtime: Runtime) -> None:
    tensor = allocate(size)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
    assert tensor.untyped_storage().nbytes() == size
    assert tensor.count_nonzero() == 0
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * size


@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_present_before_the_first_write(size: int) -> None:
    tensor = zeroed_pages(size)
    pages = present(tensor.data_ptr(), size)
    assert pages
    assert all(pages)


def test_memory_goes_back_to_the_system_with_its_last_view() -> None:
    tensor = zeroed_pages(HUGE)
    address, view = tensor.data_ptr(), tensor[mmap.PAGESIZE :].view(torch.float32)
    del tensor
    gc.collect()
    assert present(address, HUGE) is not None
    del view
    gc.collect()
    assert present(address, HUGE) is None


@needs_smaps
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no transparent huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    tensor = zeroed_pages(HUGE)
    assert "hg" in flags_of(tensor.data_ptr())


@pytest.mark.parametrize("size", SIZES)
def test_exactly_the_memory_is_page_locked_for_all_devices_when_its_pages_are_present(
    size: int, runtime: Runtime
) -> None:
    tensor = page_locked(size)
    assert runtime.registered == [(tensor.data_ptr(), size, 1)]
    assert runtime.present[0]
    assert all(runtime.present[0])


@needs_smaps
def test_a_fork_does_not_copy_page_locked_memory(runtime: Runtime) -> None:
    tensor = page_locked(HUGE)
    assert "dc" in flags_of(tensor.data_ptr())


def test_memory_is_unlocked_after_its_last_view_and_before_it_is_given_back(runtime: Runtime) -> None:
    tensor = page_locked(HUGE)
    address, view = tensor.data_ptr(), tensor[mmap.PAGESIZE :].view(torch.float32)
    del tensor
    gc.collect()
    assert runtime.unregistered == []
    del view
    gc.collect()
    assert runtime.unregistered == [address]
    assert runtime.present[-1] == [True]
    assert present(address, HUGE) is None


def test_a_refusal_is_said_once_whatever_the_threads_and_the_memory_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = pretend(monkeypatch, Runtime(code=2))
    both = threading.Barrier(2, timeout=30)
    register = runtime.cudaHostRegister

    def register_together(*arguments: int) -> int:
        both.wait()
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", register_together)
    with ThreadPoolExecutor(2) as pool:
        tensors = list(pool.map(page_locked, [4096, 4096]))
    tensors.append(page_locked(4096))
    assert len(runtime.registered) == 2
    assert [r.levelname for r in caplog.records if "refused to page-lock" in r.message] == ["WARNING"]
    for tensor in tensors:
        assert tensor.count_nonzero() == 0
        assert int(tensor.fill_(3).sum()) == 3 * 4096
    del tensor
    tensors.clear()
    gc.collect()
    assert runtime.unregistered == []


def test_layers_of_a_store_are_allocated_side_by_side_and_stay_in_order() -> None:
    both, calls = threading.Barrier(2, timeout=30), itertools.count()

    def allocate(num_bytes: int) -> torch.Tensor:
        if next(calls) < 2:
            both.wait()
        return zeroed_pages(num_bytes)

    specs = [[TensorSpec(f"w{n}", (n + 1, 64), torch.bfloat16, True, True, f"w{n}")] for n in range(9)]
    layouts = build_layouts(specs, {})
    store = HostStore(layouts, allocate)
    assert [layer.layout for layer in store.layers] == layouts
    assert [layer.weights.numel() for layer in store.layers] == [layout.host_bytes for layout in layouts]
