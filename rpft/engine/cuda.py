"""A CUDA (or ROCm) device: streams that issue to CUDA streams."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from rpft.engine.failure import Failure
from rpft.engine.host_memory import page_locked
from rpft.engine.link import EmulatedLink
from rpft.engine.queue_stream import QueueStream
from rpft.engine.streams import Delays, Stream
from rpft.engine.trace import LINK

_ALIGNMENTS = 5
"""Times that a device's clock is compared with the host's; the quickest round trip counts."""


_RESERVE_BYTES = 1 << 29
"""Device memory left to kernels, library workspaces and the allocator's fragments: 0.5 GiB."""


_ALLOCATOR_SETTINGS = "expandable_segments:True"
"""Segments that grow leave few gaps; with fixed ones torch was seen to hold a fifth more than it had given out."""


_PART_BYTES = 1 << 26
"""64 MiB of a long copy, after which others have their turn: 1 ms on PCIe 5, and 1 or 2% of its rate."""


class CudaClock:
    """Tells when events of one device were, on the host's clock.

    Aligned at the start, to about the time of a launch; what the two clocks drift apart later is not corrected.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reference = torch.cuda.Event(enable_timing=True)
        self._reference_seconds = 0.0
        self.error_seconds = 0.0
        """What the times of ``seconds`` can be off by, since the two clocks were aligned."""

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.current_stream(self._device)
        shortest_seconds = math.inf
        for _ in range(_ALIGNMENTS):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter()
            if after - before < shortest_seconds:
                shortest_seconds = after - before
                self._reference, self._reference_seconds = event, (before + after) / 2
        self.error_seconds = shortest_seconds / 2

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, stamp: torch.cuda.Event) -> float:
        return self._reference_seconds + self._reference.elapsed_time(stamp) / 1e3


class CudaStream(QueueStream):
    """A stream whose tasks launch work on one CUDA stream."""

    def __init__(
        self,
        name: str,
        failure: Failure,
        delays: Delays,
        device: torch.device,
        clock: CudaClock,
        link: EmulatedLink | None,
        priority: int = 0,
    ) -> None:
        """``link``: what this stream's transfers are slowed down to, None for the real one. ``priority``: of its
        kernels, below 0 before others'.
        """
        self._device, self._link = device, link
        self._cuda_stream = torch.cuda.Stream(device, priority=priority)
        # Behind what was done to its buffers so far: deterministic torch, for one, fills what it allocates.
        self._cuda_stream.wait_event(torch.cuda.current_stream(device).record_event())
        super().__init__(name, failure, delays, self._cuda_stream, clock)

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._cuda_stream)
        return event

    def _carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        if self._link is None or not copied_bytes:
            super()._carry_out(task, what, copied_bytes)
            return
        self._note_wait(LINK)
        transferred = self._link.reserve(self._cuda_stream, copied_bytes)

        def transfer() -> None:
            task()
            self._cuda_stream.wait_event(transferred)

        super()._carry_out(transfer, what, copied_bytes)

    def copy_giving_way(self, target: torch.Tensor, source: torch.Tensor, what: str) -> None:
        size = _PART_BYTES // source.itemsize
        parts = list(zip(target.split(size), source.split(size), strict=True))
        if self._link is not None:  # whose transfers take turns
            for part in parts:
                self.copy(*part, what)
            return

        def copy() -> None:
            # A copy engine stays with a stream for as long as that has copies for it, whatever the priorities: a
            # hidden state would come behind all weights that are under way. A kernel between two copies, which
            # does nothing, makes it look at other streams.
            for theirs, ours in parts:
                theirs.copy_(ours, non_blocking=True)
                torch.cuda._sleep(1)

        self.run(copy, what, copied_bytes=source.nbytes)

    def uses(self, tensor: Any) -> None:
        tensor.record_stream(self._cuda_stream)

    def _enter(self) -> Any:
        torch.cuda.set_device(self._device)
        context = torch.cuda.stream(self._cuda_stream)
        context.__enter__()
        return context


def _set_up_allocator() -> None:
    """Sets up torch's allocator, which has read the environment by now; what somebody has set there stays."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the one name that all releases from 2.8 on know
            torch.cuda.memory._set_allocator_settings(_ALLOCATOR_SETTINGS)


_limited: set[int] = set()
"""Devices whose share torch was given here. It keeps that for the process, whoever asked for it."""


def limit_memory(index: int, limit_bytes: int | None) -> None:
    """Caps what torch may take of a device; None takes away the cap of an earlier call, and nobody else's."""
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
        _limited.add(index)
    elif index in _limited:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        _limited.remove(index)


class CudaDevice:
    """One GPU. ``vram_limit_bytes`` caps what torch may take of it, until the next one of that GPU is made."""

    spoils = False

    def __init__(
        self, index: int, vram_limit_bytes: int | None, *, emulate_link_gbps: float | None = None
    ) -> None:
        """``emulate_link_gbps``: gigabytes (1e9) a second that each direction of the link is slowed down to."""
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self._limit = vram_limit_bytes
        torch.cuda.init()  # the allocator's statistics exist only then
        _set_up_allocator()
        limit_memory(index, vram_limit_bytes)
        torch.cuda.reset_peak_memory_stats(index)
        self._clock = CudaClock(self.torch_device)
        self._links: dict[str, EmulatedLink] = {}
        if emulate_link_gbps is not None:
            self._links = {way: EmulatedLink(self.torch_device, emulate_link_gbps) for way in ("up", "down")}

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        link = self._links.get(purpose.split()[-1])
        priority = 0 if purpose == "compute" else -1  # for the kernels between copies
        return CudaStream(
            f"{self.name} {purpose}", failure, delays, self.torch_device, self._clock, link, priority
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def release(self, tensor: torch.Tensor) -> None:
        """Stale device memory stays as it is: the next write replaces it."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return page_locked(num_bytes)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy from memory that is not locked would wait until the stream has done what was issued before.
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def memory_bytes(self) -> int | None:
        """The limit, or what is free now less what kernels and the allocator's pieces take."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        usable = free - _RESERVE_BYTES
        return usable if self._limit is None else min(usable, self._limit)

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocation_retries(self) -> int:
        return torch.cuda.memory_stats(self.torch_device)["num_alloc_retries"]

    def reclaim(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        # cuBLAS keeps a workspace of every stream that has multiplied, 32 MiB on Hopper, also when that is gone.
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()
