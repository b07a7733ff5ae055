"""A worker: one device, its five streams and fixed buffers. It owns no model state between slots.

    weights up       | weights of slot i + 1          |
    activations up   | x0 | x1 | x2 |
    compute               | slot i: x0 | x1 | x2 |
    activations down           | y0 | y1 | y2 |
    gradients down                             | gradients of slot i |

``enqueue`` queues the whole slot at once and returns; the streams' threads carry it out as its events allow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rpft.engine.buffers import Boundary, Reading, Ring
from rpft.engine.compute import GradientChain, SlotRun
from rpft.engine.device import Device
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch, Slot, SlotKind, Task
from rpft.engine.streams import Delays, Event, Stream
from rpft.model.functions import DeviceBatch, LayerFunctions
from rpft.model.layout import LayerLayout
from rpft.plan.sizes import WorkerSizes

_BATCHES_KEPT = 64
"""Microbatches whose ids and positions stay on a worker: a round's, and the next one's."""


class Worker:
    """Carries out slots on one device."""

    def __init__(
        self,
        device: Device,
        functions: LayerFunctions,
        layouts: list[LayerLayout],
        first_trained: int,
        sizes: WorkerSizes,
        failure: Failure,
        delays: Delays,
    ) -> None:
        """``first_trained``: the lowest layer with trained parameters; no gradient goes below it."""
        self.device = device
        self._functions, self._layouts, self._first_trained = functions, layouts, first_trained
        self._compute = device.stream("compute", failure, delays)
        self._weights_up = device.stream("weights up", failure, delays)
        self._activations_up = device.stream("activations up", failure, delays)
        self._activations_down = device.stream("activations down", failure, delays)
        self._gradients_down = device.stream("gradients down", failure, delays)

        def ring(num_bytes: int) -> Ring:
            return Ring([device.allocate(num_bytes) for _ in range(2)])

        self._weight_ring = ring(sizes.weight_bytes)
        self._gradient_ring = ring(4 * sizes.gradient_elements)
        self._input_ring = ring(sizes.boundary_bytes)
        self._grad_input_ring = ring(sizes.boundary_bytes)
        self._batches: dict[HostBatch, DeviceBatch] = {}

    @property
    def streams(self) -> list[Stream]:
        return [
            self._compute,
            self._weights_up,
            self._activations_up,
            self._activations_down,
            self._gradients_down,
        ]

    def enqueue(self, slot: Slot) -> None:
        """Queues all work of ``slot``; never blocks."""
        weights, freed = self._upload_weights(slot)
        self._compute.wait(slot.uploaded)
        run = SlotRun(slot, weights, self._functions, self._layouts, self._first_trained, self._device_batch)
        self._compute.run(run.begin, f"{slot} begin")
        if slot.kind in (SlotKind.FORWARD, SlotKind.LOSS):
            self._forward_tasks(slot, run)
        else:
            self._gradient_tasks(slot, run)
        if slot.losses is not None:
            self._send_losses_down(slot, run)
        self._let_go(weights, freed, f"{slot} end")

    # -- copies --------------------------------------------------------------------------------------------

    def _upload_weights(self, slot: Slot) -> tuple[torch.Tensor, Event]:
        buffer, free, freed = self._weight_ring.next()
        up = self._weights_up
        up.wait(free)
        for copy in slot.weights:
            target = buffer[copy.start : copy.start + copy.source.numel()]
            up.wait(copy.written)
            up.run(
                lambda target=target, source=copy.source: target.copy_(source, non_blocking=True),
                f"{slot} weights",
            )
        up.record(slot.uploaded)
        return buffer, freed

    def _bring_up(self, reading: Reading, ring: Ring, what: str) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queues the upload of a boundary; gives the device view, and what to call behind its last use."""
        buffer, free, freed = ring.next()
        hidden = reading.boundary.hidden
        view = buffer[: hidden.numel() * hidden.dtype.itemsize].view(hidden.dtype).view(hidden.shape)
        up = self._activations_up
        up.wait(free)
        up.wait(reading.boundary.delivered)
        up.run(lambda: view.copy_(hidden, non_blocking=True), what)
        up.record(reading.done)
        self._compute.wait(reading.done)
        return view, lambda: self._let_go(view, freed, what)

    def _bring_input_up(self, task: Task, layer: int, what: str) -> tuple[torch.Tensor | None, Callable[[], None]]:
        """As ``_bring_up`` for the input of ``layer``; the embedding has none."""
        if layer == 0:
            return None, lambda: None
        return self._bring_up(task.inputs[layer], self._input_ring, f"{what} input")

    def _let_go(self, view: torch.Tensor, freed: Event, what: str) -> None:
        """Queues, behind its last use, that a ring buffer is free again."""
        self._compute.run(lambda: self.device.release(view), what)
        self._compute.record(freed)

    def _send_down(self, take: Callable[[], torch.Tensor], boundary: Boundary, ready: Event, what: str) -> None:
        """Queues the download of the tensor that ``take`` gives once ``ready`` is complete."""
        down = self._activations_down
        down.wait(ready)
        for guard in boundary.writable_after:
            down.wait(guard)

        def copy() -> None:
            tensor = take()
            down.uses(tensor)
            boundary.hidden.copy_(tensor, non_blocking=True)

        down.run(copy, what)
        down.record(boundary.delivered)

    def _bring_gradients_up(self, slot: Slot, gradient: torch.Tensor, free: Event) -> None:
        """Queues what the gradient sums of a slot start from: zero, or the sums of the round before."""
        self._compute.wait(free)
        if not any(copy.goes_on for copy in slot.gradients):
            self._compute.run(gradient.zero_, f"{slot} begin")
            return
        up = self._weights_up
        up.wait(free)
        for copy in slot.gradients:
            up.wait(copy.after)
            ours = gradient[copy.start : copy.start + copy.host.numel()]
            up.run(lambda ours=ours, host=copy.host: ours.copy_(host, non_blocking=True), f"{slot} gradients up")
        self._compute.wait(up.record(Event()))

    def _send_gradients_down(self, slot: Slot, gradient: torch.Tensor, freed: Event) -> None:
        down = self._gradients_down
        down.wait(self._compute.record(Event()))
        for copy in slot.gradients:
            ours = gradient[copy.start : copy.start + copy.host.numel()]
            down.wait(copy.after)
            down.run(lambda ours=ours, host=copy.host: host.copy_(ours, non_blocking=True), f"{slot} gradients")
            down.record(copy.landed)
        down.run(lambda: self.device.release(gradient), f"{slot} gradients")
        down.record(freed)

    # -- compute -------------------------------------------------------------------------------------------

    def _forward_tasks(self, slot: Slot, run: SlotRun) -> None:
        """A forward stage, or in an evaluation the fused one, which has losses for an output."""
        for number, task in enumerate(slot.tasks):
            what = f"{slot} microbatch {number}"
            hidden, let_go = self._bring_input_up(task, slot.stage.first, what)
            if slot.kind is SlotKind.LOSS:
                self._compute.run(partial(run.loss, task, hidden), what)
                let_go()
                continue
            produced: dict[int, torch.Tensor] = {}
            self._compute.run(partial(run.forward, task, hidden, produced), what)
            computed = self._compute.record(Event())
            let_go()
            for layer, boundary in task.outputs.items():
                self._send_down(partial(produced.pop, layer), boundary, computed, f"{what} output")

    def _gradient_tasks(self, slot: Slot, run: SlotRun) -> None:
        """The fused stage or a backward one. A segment is recomputed before the gradient for it is waited for."""
        buffer, free, freed = self._gradient_ring.next()
        gradient = buffer.view(torch.float32)
        self._bring_gradients_up(slot, gradient, free)
        self._compute.run(lambda: run.take_gradient_buffer(gradient), f"{slot} begin")
        for number, task in enumerate(slot.tasks):
            what = f"{slot} microbatch {number}"
            chain = GradientChain()
            for segment in slot.segments:
                hidden, let_go = self._bring_input_up(task, segment.first, what)
                self._compute.run(partial(run.recompute, task, segment, hidden, chain), what)
                releases = [let_go]
                if task.grad_input is not None and segment.last == slot.stage.last:
                    view, let_go = self._bring_up(task.grad_input, self._grad_input_ring, f"{what} gradient")
                    self._compute.run(partial(chain.put, view), what)
                    releases.append(let_go)
                self._compute.run(partial(run.backward, task, segment, chain), what)
                for release in releases:
                    release()
            if task.grad_output is not None:
                computed = self._compute.record(Event())
                self._send_down(chain.take, task.grad_output, computed, f"{what} gradient")
        self._send_gradients_down(slot, gradient, freed)

    def _send_losses_down(self, slot: Slot, run: SlotRun) -> None:
        assert slot.losses is not None
        assert slot.losses_ready is not None
        losses, ready = slot.losses, slot.losses_ready
        self._activations_down.wait(self._compute.record(Event()))
        self._activations_down.run(lambda: run.store_losses(losses, self._activations_down), f"{slot} losses")
        self._activations_down.record(ready)

    def _device_batch(self, batch: HostBatch) -> DeviceBatch:
        """``batch`` on this device; the last few are kept, since a round's slots use the same ones."""
        found = self._batches.get(batch)
        if found is None:
            to = self.device.torch_device

            def move(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(to, non_blocking=True)

            found = DeviceBatch(
                move(batch.input_ids),
                None if batch.position_ids is None else move(batch.position_ids),
                move(batch.trained_at),
                move(batch.targets),
            )
            self._batches[batch] = found
            if len(self._batches) > _BATCHES_KEPT:
                self._batches.pop(next(iter(self._batches)))
        return found
