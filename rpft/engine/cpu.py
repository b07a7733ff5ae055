"""The CPU stand-in for a GPU: memory of its own, streams that are threads, stale memory poisoned with NaN."""

from __future__ import annotations

import torch

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Stream
from rpft.model.pages import zeroed_pages

POISON_BYTE = 0xFF
"""Every float format that rpft uses reads this byte, repeated, as NaN."""


class CpuDevice:
    """A stand-in worker. What a slot leaves behind is poisoned, so that a read past its time shows."""

    spoils = True

    def __init__(self, index: int) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._allocated_bytes = 0

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        return Stream(f"{self.name} {purpose}", failure, delays)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._allocated_bytes += num_bytes
        return torch.full((num_bytes,), POISON_BYTE, dtype=torch.uint8)

    def release(self, tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).fill_(POISON_BYTE)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return zeroed_pages(num_bytes)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def memory_bytes(self) -> int | None:
        return None

    def used_bytes(self) -> int:
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        """The worker's own buffers; what autograd holds inside a task is the process's and not counted."""
        return self._allocated_bytes

    def reset_peak(self) -> None:
        """Fixed buffers stay, and they are all that is counted."""

    def allocation_retries(self) -> int:
        return 0

    def reclaim(self) -> None:
        self._allocated_bytes = 0
