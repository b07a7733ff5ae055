"""A CUDA (or ROCm) device: streams that issue to CUDA streams, exactly page-locked host memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event, Stream

logger = logging.getLogger(__name__)

_TASKS_IN_FLIGHT = 2
"""Tasks of a stream issued and not complete: enough to hide launching, few enough to bound memory."""


_RESERVE_BYTES = 1 << 29
"""Device memory left to kernels, library workspaces and the allocator's fragments: 0.5 GiB."""


class CudaStream(Stream):
    """A stream whose tasks launch work on one CUDA stream; waits between CUDA streams never block the host."""

    def __init__(self, name: str, failure: Failure, delays: Delays, device: torch.device) -> None:
        self._device = device
        self.native = torch.cuda.Stream(device)
        self._in_flight: deque[torch.cuda.Event] = deque()
        super().__init__(name, failure, delays)

    def run(self, task: Callable[[], object], what: str) -> None:
        def issue() -> None:
            task()
            mark = torch.cuda.Event()
            mark.record(self.native)
            self._in_flight.append(mark)
            if len(self._in_flight) > _TASKS_IN_FLIGHT:
                self._in_flight.popleft().synchronize()

        super().run(issue, what)

    def uses(self, tensor: Any) -> None:
        tensor.record_stream(self.native)

    def _await(self, event: Event) -> None:
        event.wait_issued(self._failure)
        if event.native is not None:
            self.native.wait_event(event.native)

    def _mark(self, event: Event) -> None:
        native = torch.cuda.Event()
        native.record(self.native)
        event.set(native)

    def _enter(self) -> Any:
        torch.cuda.set_device(self._device)
        context = torch.cuda.stream(self.native)
        context.__enter__()
        return context


class CudaDevice:
    """One GPU. ``vram_limit_bytes`` caps what torch may take of it."""

    def __init__(self, index: int, vram_limit_bytes: int | None) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self._limit = vram_limit_bytes
        torch.cuda.init()  # the allocator's statistics exist only then
        if vram_limit_bytes is not None:
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, vram_limit_bytes / total), index)
        torch.cuda.reset_peak_memory_stats(index)

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        return CudaStream(f"{self.name} {purpose}", failure, delays, self.torch_device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def release(self, tensor: torch.Tensor) -> None:
        """Stale device memory stays as it is: the next write replaces it."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return page_locked(num_bytes)

    def memory_bytes(self) -> int | None:
        """The limit, or what is free now less what kernels and the allocator's pieces take."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        usable = free - _RESERVE_BYTES
        return usable if self._limit is None else min(usable, self._limit)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


class _PageLocking:
    refused = False


def page_locked(num_bytes: int) -> torch.Tensor:
    """Exactly ``num_bytes`` of zeroed page-locked memory, uint8; pageable, and said once, where refused.

    An anonymous mapping that is registered afterwards: the caching allocator for pinned memory rounds up to
    powers of two and would waste up to half of the RAM.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes)
    holder = (ctypes.c_char * num_bytes).from_buffer(mapping)
    tensor = torch.frombuffer(holder, dtype=torch.uint8)
    if _PageLocking.refused:
        return tensor
    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 1)  # 1: portable, valid on all devices
    if int(code) == 0:
        # The finaliser holds the mapping, so that the pages are given back to the system only after this.
        weakref.finalize(holder, _unregister, runtime, tensor.data_ptr(), mapping)
    else:
        _PageLocking.refused = True
        logger.warning(
            "the system refused to page-lock host memory (%s): copies run from pageable memory, several"
            " times slower; raise the limit (ulimit -l unlimited) to mend it",
            code,
        )
    return tensor


def _unregister(runtime: Any, address: int, mapping: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)
    del mapping
