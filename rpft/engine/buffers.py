"""Memory that is used over and over: rings of device buffers, and host buffers for what crosses between stages.

Both are handed out by the controller in the order of the program, before anything has run. A buffer carries the
events after which it may be written again, so that its next writer waits for its last reader and nobody else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rpft.engine.device import Device
from rpft.engine.streams import Event, Stream, happened


class Ring:
    """A few device buffers used in turn."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._free = [happened() for _ in buffers]
        self._turn = 0

    def next(self) -> tuple[torch.Tensor, Event, Event]:
        """(buffer, the event before which it must not be written, the event that its last reader must record)."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        free, self._free[turn] = self._free[turn], Event()
        return self._buffers[turn], free, self._free[turn]


def free_behind(stream: Stream, device: Device, buffer: torch.Tensor, freed: Event, what: str) -> None:
    """Queues on ``stream``, behind the last use of a ring's buffer, that it is free again."""
    if device.spoils:
        stream.run(lambda: device.release(buffer), what)
    stream.record(freed)


class Views:
    """Views of buffers that live as long as this. To make one takes longer than all else of a copy's order."""

    def __init__(self) -> None:
        self._shaped: dict[int, torch.Tensor] = {}
        """Of each buffer the one that was asked for last: the next use is mostly of the same shape."""
        self._parts: dict[tuple[int, int, int], torch.Tensor] = {}

    def shaped(self, buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The start of ``buffer``, uint8, as a tensor."""
        address = buffer.data_ptr()
        found = self._shaped.get(address)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self._shaped[address] = found
        return found

    def part(self, flat: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """Elements of ``flat``, a buffer in the one type that its parts are asked for in: a plan has few."""
        key = flat.data_ptr(), start, length
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = flat[start : start + length]
        return found


@dataclass(slots=True)
class Boundary:
    """A hidden state, its gradient, or what a block keeps, on its way through host memory from slot to slot.

    ``hidden`` is a host view [rows, sequence, hidden], or uint8 [bytes] of what is kept; ``writable_after`` are
    the last readers of its memory.
    """

    hidden: torch.Tensor
    memory: torch.Tensor
    writable_after: list[Event]
    readers_left: int
    delivered: Event = field(default_factory=Event)
    read: list[Event] = field(default_factory=list)
    last_read_at: int = 0
    """About when, of the readings so far; see ``Pace``."""


class Reading(NamedTuple):
    """One slot's use of a boundary: ``done`` completes when the content has been copied to the worker."""

    boundary: Boundary
    done: Event


class BoundaryPool:
    """Host buffers for boundaries, all of one size; grows to what the plan needs.

    Of those that are free by the order of the program the one is used again that is first free in time: workers
    are at several slots at once, and who takes the memory of a slot that is not nearly done waits for it.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], num_bytes: int, dtype: torch.dtype) -> None:
        self._allocate, self._num_bytes, self._dtype = allocate, num_bytes, dtype
        self._free: list[tuple[int, int, torch.Tensor, list[Event]]] = []
        """A heap: (when it is free, number of the reading, memory, its last readers)."""
        self._readings = 0
        self._views = Views()
        self.num_buffers = 0

    def acquire(self, shape: tuple[int, ...], num_readers: int) -> Boundary:
        """A boundary of ``shape`` that ``num_readers`` slots will read."""
        if self._free:
            _, _, memory, guards = heapq.heappop(self._free)
        else:
            memory, guards = self._allocate(self._num_bytes), []
            self.num_buffers += 1
        return Boundary(self._views.shaped(memory, shape, self._dtype), memory, guards, num_readers)

    def acquire_bytes(self, num_readers: int) -> Boundary:
        """As ``acquire``, of a whole buffer of bytes."""
        return self.acquire((self._num_bytes // self._dtype.itemsize,), num_readers)

    def read(self, boundary: Boundary, at: int) -> Reading:
        """The next reading of ``boundary``; with the last one its memory goes back to the pool.

        ``at``: about when that will be, see ``Pace``.
        """
        reading = Reading(boundary, Event())
        boundary.read.append(reading.done)
        boundary.readers_left -= 1
        assert boundary.readers_left >= 0
        boundary.last_read_at = max(boundary.last_read_at, at)
        if boundary.readers_left == 0:
            self._readings += 1
            heapq.heappush(self._free, (boundary.last_read_at, self._readings, boundary.memory, boundary.read))
        return reading
