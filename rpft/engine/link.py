"""A slower link than the machine has, for benchmarks only: what cards with less PCIe would see."""

from __future__ import annotations

import threading
from collections import deque

import torch

_FIRST_DELAY_CYCLES = 10_000_000
"""Some milliseconds: long against the microseconds of a launch."""
_MEASURED_SECONDS = 1e-3
"""Delays of at least this length say how long a cycle is; shorter ones are too much launching."""
_DELAYS_MEASURED = 16
"""So many of the last ones, together: what one that started late says must not shorten a long one behind it."""


class EmulatedLink:
    """One direction of one GPU's link at ``gigabytes_per_second`` (1e9 bytes).

    Each transfer holds the link for bytes / rate: its copy runs at the real speed, and beside it a kernel that
    only spins, which the copy's stream then waits for, so a transfer takes the longer of the two. Transfers of
    one direction hold the link one after the other, in the order in which their streams reach them, as on one
    copy engine. The two directions do not see each other (PCIe is full duplex).

    What that distorts: the spinning kernel occupies a slot of one multiprocessor, and where other kernels fill
    them all it starts late. Its length is counted in GPU cycles; how long they are moves with the load and is
    taken from the last delays. A copy is launched only when its stream has reached it, so each transfer
    costs a launch more.
    """

    def __init__(self, device: torch.device, gigabytes_per_second: float) -> None:
        self._bytes_per_second = gigabytes_per_second * 1e9
        self._stream = torch.cuda.Stream(device, priority=-1)  # starts before blocks of compute that wait
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None
        self._delays: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._measured: deque[tuple[int, float]] = deque(maxlen=_DELAYS_MEASURED)
        self._cycles_per_second = 1e9
        for _ in range(2):  # the first also loads the kernel
            self._measured.clear()
            self._delay(_FIRST_DELAY_CYCLES).synchronize()
            self._measure()

    def reserve(self, stream: torch.cuda.Stream, num_bytes: int) -> torch.cuda.Event:
        """Takes the link for one transfer: what ``stream`` is given next starts when it is that transfer's turn.

        Blocks the calling thread until ``stream`` has reached this point. The transfer must not be complete before
        the event that is returned.
        """
        reached = torch.cuda.Event()
        reached.record(stream)
        reached.synchronize()  # else a transfer that waits for compute would hold the link meanwhile
        with self._lock:
            self._measure()
            if self._last is not None:
                stream.wait_event(self._last)
            self._last = self._delay(round(num_bytes / self._bytes_per_second * self._cycles_per_second))
            return self._last

    def _delay(self, cycles: int) -> torch.cuda.Event:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self._stream)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(cycles)
        last.record(self._stream)
        self._delays.append((first, last, cycles))
        return last

    def _measure(self) -> None:
        """Takes the length of a cycle from the delays that are over."""
        while self._delays and self._delays[0][1].query():
            first, last, cycles = self._delays.popleft()
            seconds = first.elapsed_time(last) / 1e3
            if seconds >= _MEASURED_SECONDS:
                self._measured.append((cycles, seconds))
                self._cycles_per_second = sum(c for c, _ in self._measured) / sum(s for _, s in self._measured)
