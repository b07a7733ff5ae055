"""Frozen weights on their way from the disk to a worker: read in the order of its slots, ahead of their upload.

    weights from disk    | read i + 2 into b0 |  read i + 3 into b1  |
    weights up           |        | i + 1 from b1 |          | i + 2 from b0 |
    compute              |   slot i     |     slot i + 1      |

Two host buffers of a stage each, page-locked where the device wants it, since a copy from a file's mapping is slow
on CUDA and holds up whoever issues it. One is read into while the other goes up. Meanwhile the system has been
asked for what comes after, so that the disk need not wait for a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rpft.engine.buffers import Ring, free_behind
from rpft.engine.device import Device
from rpft.engine.failure import Failure
from rpft.engine.slot import Slot
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.trace import BUFFER
from rpft.model.pages import read_ahead


class ReadAhead:
    """The disk's side of one worker: a stream of the host's, and two buffers."""

    def __init__(self, device: Device, num_bytes: int, failure: Failure, delays: Delays) -> None:
        """``num_bytes``: of the largest stage's weights."""
        self._device = device
        self._ring = Ring([device.allocate_host(num_bytes) for _ in range(2)])
        self.stream = Stream(f"{device.name} weights from disk", failure, delays)

    def read(self, slot: Slot) -> tuple[list[tuple[int, torch.Tensor]], Event, Callable[[Stream], None]]:
        """Queues the reading of what ``slot`` uploads from the disk.

        Gives (place in the weight buffer, host bytes) of each run, valid when the event that comes with it is
        complete, and what queues behind its last use on a stream that the buffer is free again.
        """
        buffer, free, freed = self._ring.next()
        runs = []
        copies = [copy for copy in slot.weights if copy.on_disk]
        for copy in copies:
            self.stream.run(partial(read_ahead, copy.source), f"{slot} weights asked for")
        self.stream.wait(free, BUFFER)
        for copy in copies:
            target = buffer[copy.start : copy.start + copy.source.numel()]
            self.stream.run(partial(target.copy_, copy.source), f"{slot} weights read")
            runs.append((copy.start, target))

        def let_go(stream: Stream) -> None:
            free_behind(stream, self._device, buffer, freed, f"{slot} weights read")

        return runs, self.stream.record(Event()), let_go
