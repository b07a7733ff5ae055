"""The small interface between the engine and a device, and the pools of both kinds.

Everything above it is written once. A device gives memory, streams and host memory that suits its copies.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Stream
from rpft.errors import UserError


class Device(Protocol):
    """One GPU, or one CPU stand-in."""

    name: str
    torch_device: torch.device
    spoils: bool
    """Whether ``release`` changes the buffer."""

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        """A new in-order stream of this device. It starts behind what the calling thread has issued to it."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory, uint8 [num_bytes]."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Says, in stream order, that the content of a buffer is no longer valid."""
        ...

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Host memory that this device copies from and to at full speed, uint8 [num_bytes], zeroed."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of ordinary host memory on the device, in order of the current stream; never waits."""
        ...

    def memory_bytes(self) -> int | None:
        """Device memory that the worker may take; None where it has none of its own."""
        ...

    def used_bytes(self) -> int:
        """Device memory held now; any thread's."""
        ...

    def peak_bytes(self) -> int:
        """Most device memory held at once since the start, or since ``reset_peak``."""
        ...

    def reset_peak(self) -> None:
        """Forgets the peak so far."""
        ...

    def allocation_retries(self) -> int:
        """Times that memory was found only after what was kept for later had been given back, since the start.

        Each stops the device.
        """
        ...

    def reclaim(self) -> None:
        """Gives back the memory of what is gone, once all that was issued is done; for an engine that failed."""
        ...


def cuda_available() -> bool:
    return torch.cuda.is_available()


def make_pool(
    kind: str, num_workers: int | None, vram_limit_bytes: int | None, emulate_link_gbps: float | None = None
) -> list[Device]:
    """The devices of ``engine.device`` and ``engine.workers``; UserError where the machine lacks them.

    ``emulate_link_gbps``: see ``CudaDevice``.
    """
    from rpft.engine.cpu import CpuDevice

    if kind == "auto":
        kind = "cuda" if cuda_available() else "cpu"
    if kind == "cpu":
        return [CpuDevice(i) for i in range(num_workers or 2)]
    if not cuda_available():
        raise UserError("engine.device is cuda, and torch sees no CUDA device; use engine.device=cpu or auto")
    found = torch.cuda.device_count()
    wanted = num_workers or found
    if wanted > found:
        raise UserError(f"engine.workers is {wanted}, and this machine has {found} CUDA devices")
    from rpft.engine.cuda import CudaDevice

    return [CudaDevice(i, vram_limit_bytes, emulate_link_gbps=emulate_link_gbps) for i in range(wanted)]
