"""The gradient sums of a worker: what they start from, their norm, their rounding, their way to the host store."""

from __future__ import annotations

import torch

from rpft.engine.buffers import Ring, Views, free_behind
from rpft.engine.device import Device
from rpft.engine.slot import GradientCopy, Slot
from rpft.engine.streams import Event, Stream
from rpft.engine.trace import BUFFER, COMPUTE, GRADIENTS, OPTIMIZER
from rpft.model.layout import ALIGNMENT_ELEMENTS


class Accumulators:
    """The buffers of one worker in which a slot's gradients are summed in float32, and from which they leave."""

    def __init__(self, device: Device, num_elements: int, leaving_dtype: torch.dtype) -> None:
        """``num_elements``: of the largest slot's gradient, which goes to the host as ``leaving_dtype``."""
        self._device, self._dtype = device, leaving_dtype
        self._views = Views()
        self._rounds = leaving_dtype != torch.float32
        # Rounded gradients leave from a buffer of their own, so that the next slot can sum up at once: one
        # accumulator is enough, and both take less than two accumulators.
        count = 1 if self._rounds else 2
        self._ring = Ring([device.allocate(4 * num_elements) for _ in range(count)])
        if self._rounds:
            self._rounded_ring = Ring([device.allocate(leaving_dtype.itemsize * num_elements)])

    def begin(self, slot: Slot, compute: Stream, up: Stream) -> tuple[torch.Tensor, Event]:
        """Queues what the gradient sums of a slot start from: zero, or the sums of the round before.

        Gives the accumulator, float32 [elements of the slot], and the event that says when it is free again.
        """
        buffer, free, freed = self._ring.next()
        accumulator = self._views.shaped(buffer, (slot.gradient_elements,), torch.float32)
        compute.wait(free, GRADIENTS)
        if not any(copy.goes_on for copy in slot.gradients):
            compute.run(accumulator.zero_, f"{slot} begin")
            return accumulator, freed
        up.wait(free, BUFFER)
        for copy in slot.gradients:
            up.wait(copy.after, GRADIENTS)
            up.copy_giving_way(self._part(copy, accumulator), copy.host, f"{slot} gradients up")
        compute.wait(up.record(Event()), GRADIENTS)
        return accumulator, freed

    def send_down(
        self, slot: Slot, accumulator: torch.Tensor, freed: Event, compute: Stream, down: Stream
    ) -> None:
        """Queues the end of a slot's gradient sums, which ``begin`` gave: norm, rounding, the way to the host."""
        if not slot.gradients:  # the head of an adapter's model
            free_behind(compute, self._device, accumulator, freed, f"{slot} gradients")
            return
        what = f"{slot} gradients"
        normed = [
            (copy.square, self._views.part(accumulator, copy.start, copy.num_own))
            for copy in slot.gradients
            if copy.square is not None
        ]
        squares: list[tuple[torch.Tensor, torch.Tensor]] = []
        compute.run(
            lambda: squares.extend((host, square_sum(part)) for host, part in normed), f"{slot} gradient norm"
        )
        source, sent = accumulator, freed
        if self._rounds:
            buffer, free, sent = self._rounded_ring.next()
            source = self._views.shaped(buffer, accumulator.shape, self._dtype)
            compute.wait(free, GRADIENTS)
            compute.run(lambda: source.copy_(accumulator), f"{what} rounded")
            free_behind(compute, self._device, accumulator, freed, what)
        down.wait(compute.record(Event()), COMPUTE)
        down.run(lambda: _store_squares(squares, down), f"{slot} gradient norm")
        for copy in slot.gradients:
            down.wait(copy.after, GRADIENTS if copy.goes_on else OPTIMIZER)
            down.copy_giving_way(copy.host, self._part(copy, source), what)
            down.record(copy.landed)
        free_behind(down, self._device, source, sent, what)

    def _part(self, copy: GradientCopy, flat: torch.Tensor) -> torch.Tensor:
        """The layer's part of a buffer for the whole slot's gradient."""
        return self._views.part(flat, copy.start, copy.host.numel())


def _store_squares(squares: list[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
    for host, square in squares:
        stream.uses(square)
        host.copy_(square, non_blocking=True)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum of squares of float32 ``flat``, whose length is a multiple of the alignment, float64 scalar.

    Row by row: one float32 sum over a large layer would be far too coarse.
    """
    return torch.linalg.vector_norm(flat.view(-1, ALIGNMENT_ELEMENTS), dim=1).double().square().sum()
