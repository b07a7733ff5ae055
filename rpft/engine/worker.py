"""A worker: one device, its five streams and fixed buffers. It owns no model state between slots.

    weights up       | weights of slot i + 1          |
    activations up   | x0 | x1 | x2 |
    compute               | slot i: x0 | x1 | x2 |
    activations down           | y0 | y1 | y2 |
    gradients down                             | gradients of slot i |

Where frozen weights lie on the disk there is a sixth stream, of the host's: engine/read_ahead.py.
``enqueue`` queues the whole slot at once and returns; the streams' threads carry it out as its events allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from rpft.engine.accumulators import Accumulators
from rpft.engine.buffers import Boundary, Reading, Ring, Views, free_behind
from rpft.engine.compute import ForwardState, GradientChain, SlotRun
from rpft.engine.device import Device
from rpft.engine.failure import Failure
from rpft.engine.places import Places
from rpft.engine.read_ahead import ReadAhead
from rpft.engine.slot import HostBatch, Slot, SlotKind, Task
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.trace import BUFFER, COMPUTE, DISK, INPUT, OPTIMIZER, WEIGHTS
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.layout import LayerLayout
from rpft.model.packed_attention import row_starts
from rpft.plan.plan import Stage
from rpft.plan.sizes import RESULTS_IN_FLIGHT, WorkerSizes

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
        keep_bytes_per_token: int,
        resident: dict[int, torch.Tensor],
        failure: Failure,
        delays: Delays,
        frozen_on_disk: bool = False,
    ) -> None:
        """``first_trained``: the lowest layer with trained parameters; no gradient goes below it.

        ``keep_bytes_per_token``: see ``Plan``. ``resident``: layer to its frozen weights on the host, of layers
        whose frozen weights stay here; they are brought up now. ``frozen_on_disk``: whether others lie in a file.
        """
        self.device = device
        self._functions, self._first_trained = functions, first_trained
        self._keep_bytes_per_token = keep_bytes_per_token

        def ring(num_bytes: int) -> Ring:
            return Ring([device.allocate(num_bytes) for _ in range(2)])

        self._weight_ring = ring(sizes.weight_bytes)
        self._accumulators = Accumulators(device, sizes.gradient_elements, sizes.gradient_dtype)
        self._input_ring = ring(sizes.boundary_bytes)
        self._grad_input_ring = ring(sizes.boundary_bytes)
        self._kept_ring = ring(sizes.kept_bytes)
        stays = {layer: device.allocate(source.numel()).copy_(source) for layer, source in resident.items()}
        self._places = Places(layouts, stays)
        self._views = Views()
        self._batches: dict[HostBatch, DeviceBatch] = {}
        self._going_down: deque[Event] = deque()
        """When each result is down that is computed, the oldest first; without those that were waited for."""
        # Last, so that no thread is left behind where a buffer is too much; the one of the disk, which has buffers
        # too, before the others.
        self._read_ahead = ReadAhead(device, sizes.weight_bytes, failure, delays) if frozen_on_disk else None
        self._compute = device.stream("compute", failure, delays)
        self._weights_up = device.stream("weights up", failure, delays)
        self._activations_up = device.stream("activations up", failure, delays)
        self._activations_down = device.stream("activations down", failure, delays)
        self._gradients_down = device.stream("gradients down", failure, delays)

    @property
    def streams(self) -> list[Stream]:
        return [
            *([] if self._read_ahead is None else [self._read_ahead.stream]),
            self._compute,
            self._weights_up,
            self._activations_up,
            self._activations_down,
            self._gradients_down,
        ]

    def enqueue(self, slot: Slot) -> None:
        """Queues all work of ``slot``; never blocks."""
        weights, freed = self._upload_weights(slot)
        self._compute.wait(slot.uploaded, WEIGHTS)
        run = SlotRun(
            slot,
            weights,
            self._functions,
            self._places,
            self._first_trained,
            self._keep_bytes_per_token,
            self._device_batch,
        )
        self._compute.run(run.begin, f"{slot} begin")
        if slot.kind in (SlotKind.FORWARD, SlotKind.LOSS):
            self._forward_tasks(slot, run)
        else:
            self._gradient_tasks(slot, run)
        for losses, ready, store in (
            (slot.losses, slot.losses_ready, run.store_losses),
            (slot.router_losses, slot.router_losses_ready, run.store_router_losses),
        ):
            if losses is not None:
                self._send_losses_down(losses, ready, store, f"{slot} losses")
        self._let_go(weights, freed, f"{slot} end")

    # -- copies --------------------------------------------------------------------------------------------

    def _upload_weights(self, slot: Slot) -> tuple[torch.Tensor, Event]:
        buffer, free, freed = self._weight_ring.next()
        up, what = self._weights_up, f"{slot} weights"
        up.wait(free, BUFFER)

        def bring(start: int, source: torch.Tensor) -> None:
            up.copy_giving_way(self._views.part(buffer, start, source.numel()), source, what)

        if any(copy.on_disk for copy in slot.weights):
            assert self._read_ahead is not None
            runs, read, let_go = self._read_ahead.read(slot)
            up.wait(read, DISK)
            for start, source in runs:
                bring(start, source)
            let_go(up)
        for copy in slot.weights:
            if not copy.on_disk:
                up.wait(copy.written, OPTIMIZER)
                bring(copy.start, copy.source)
        up.record(slot.uploaded)
        return buffer, freed

    def _bring_up(self, reading: Reading, ring: Ring, what: str) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queues the upload of a boundary; gives the device view, and what to call behind its last use."""
        buffer, free, freed = ring.next()
        boundary = reading.boundary
        hidden = boundary.hidden
        view = self._views.shaped(buffer, hidden.shape, hidden.dtype)
        up = self._activations_up
        up.wait(free, BUFFER)
        up.wait(boundary.delivered, INPUT)
        up.copy(view, hidden, what)
        up.record(reading.done)
        self._compute.wait(reading.done, INPUT)
        return view, lambda: self._let_go(view, freed, what)

    def _bring_input_up(self, task: Task, layer: int, what: str) -> tuple[torch.Tensor | None, Callable[[], None]]:
        """As ``_bring_up`` for the input of ``layer``; the embedding has none."""
        if layer == 0:
            return None, lambda: None
        return self._bring_up(task.inputs[layer], self._input_ring, f"{what} input")

    def _bring_kept_up(
        self, task: Task, segment: Stage, chain: GradientChain, what: str
    ) -> list[Callable[[], None]]:
        """As ``_bring_up`` for what the forwards of a segment kept, which ``chain`` is given."""
        releases = []
        for layer in [each for each in segment.layers if each in task.kept_inputs]:
            flat, let_go = self._bring_up(task.kept_inputs[layer], self._kept_ring, f"{what} kept")
            if len(segment.layers) == 1:
                self._compute.run(partial(chain.given.__setitem__, layer, flat), what)
                releases.append(let_go)
            else:  # choices of routers: small, and more of them than there are buffers
                self._compute.run(partial(chain.give_copy, layer, flat), what)
                let_go()
        return releases

    def _let_go(self, view: torch.Tensor, freed: Event, what: str) -> None:
        """Queues, behind its last use, that a ring buffer is free again."""
        free_behind(self._compute, self.device, view, freed, what)

    def _send_down(self, take: Callable[[], torch.Tensor], boundary: Boundary, ready: Event, what: str) -> None:
        """Queues the download of the tensor that ``take`` gives once ``ready`` is complete."""
        down = self._activations_down
        down.wait(ready, COMPUTE)

        def copy() -> None:
            tensor = take()
            down.uses(tensor)
            boundary.hidden.copy_(tensor, non_blocking=True)

        self._deliver(boundary, copy, what)

    def _send_kept_down(
        self, take: Callable[[], list[tuple[int, torch.Tensor]]], boundary: Boundary, what: str
    ) -> None:
        """Queues, behind the block's output, the download of what it keeps: (offset, bytes) of each part."""
        down = self._activations_down

        def copy() -> None:
            for offset, part in take():
                down.uses(part)
                boundary.memory[offset : offset + part.numel()].copy_(part, non_blocking=True)

        self._deliver(boundary, copy, what)

    def _deliver(self, boundary: Boundary, copy: Callable[[], None], what: str) -> None:
        """Queues ``copy``, which fills ``boundary``, when the last readers of its memory are done."""
        down = self._activations_down
        for guard in boundary.writable_after:
            down.wait(guard, BUFFER)
        down.run(copy, what, copied_bytes=boundary.hidden.nbytes)
        down.record(boundary.delivered)

    # -- compute -------------------------------------------------------------------------------------------

    def _await_room(self) -> None:
        """Queues that compute goes on when few results are left to go down: on a slow link they would pile up."""
        while len(self._going_down) >= RESULTS_IN_FLIGHT:
            self._compute.wait_on_host(self._going_down.popleft(), BUFFER)

    def _forward_tasks(self, slot: Slot, run: SlotRun) -> None:
        """A forward stage, or in an evaluation the fused one, which has losses for an output."""
        for number, task in enumerate(slot.tasks):
            what = f"{slot} microbatch {number}"
            output, kept = f"{what} output", f"{what} kept"
            hidden, let_go = self._bring_input_up(task, slot.stage.first, what)
            if slot.kind is SlotKind.LOSS:
                self._compute.run(partial(run.loss, task, hidden), what)
                let_go()
                continue
            state = ForwardState(hidden)
            first = slot.stage.first
            for last, boundary in task.outputs.items():  # each goes down while the layers above it compute
                self._await_room()
                self._compute.run(partial(run.forward, task, range(first, last), state), what)
                computed = self._compute.record(Event())
                if first == slot.stage.first:
                    let_go()
                self._send_down(state.outputs.popleft, boundary, computed, output)
                for layer in [each for each in range(first, last) if each in task.kept_outputs]:
                    boundary = task.kept_outputs[layer]
                    self._send_kept_down(state.kept.popleft, boundary, kept)
                self._going_down.append(boundary.delivered)
                first = last

    def _gradient_tasks(self, slot: Slot, run: SlotRun) -> None:
        """The fused stage or a backward one. A segment is recomputed before the gradient for it is waited for."""
        accumulator, freed = self._accumulators.begin(slot, self._compute, self._weights_up)
        self._compute.run(lambda: run.take_accumulator(accumulator), f"{slot} begin")
        for number, task in enumerate(slot.tasks):
            what = f"{slot} microbatch {number}"
            chain = GradientChain()
            self._await_room()
            for segment in slot.segments:
                hidden, let_go = self._bring_input_up(task, segment.first, what)
                releases = [let_go]
                releases += self._bring_kept_up(task, segment, chain, what)
                self._compute.run(partial(run.recompute, task, segment, hidden, chain), what)
                if task.grad_input is not None and segment.last == slot.stage.last:
                    view, let_go = self._bring_up(task.grad_input, self._grad_input_ring, f"{what} gradient")
                    self._compute.run(partial(chain.put, view), what)
                    releases.append(let_go)
                self._compute.run(partial(run.backward, task, chain), what)
                for release in releases:
                    release()
            if task.grad_output is not None:
                computed = self._compute.record(Event())
                self._send_down(chain.take, task.grad_output, computed, f"{what} gradient")
                self._going_down.append(task.grad_output.delivered)
        self._accumulators.send_down(slot, accumulator, freed, self._compute, self._gradients_down)

    def _send_losses_down(
        self, host: torch.Tensor, ready: Event, store: Callable[[torch.Tensor, Stream], None], what: str
    ) -> None:
        down = self._activations_down
        down.wait(self._compute.record(Event()), COMPUTE)
        down.run(lambda: store(host, down), what)
        down.record(ready)

    def _device_batch(self, batch: HostBatch) -> DeviceBatch:
        """``batch`` on this device; the last few are kept, since a round's slots use the same ones."""
        found = self._batches.get(batch)
        if found is None:
            move, positions = self.device.bring, batch.position_ids
            found = DeviceBatch(
                move(batch.input_ids),
                None if positions is None else move(positions),
                move(batch.trained_at),
                move(batch.targets),
                move(row_starts(positions))
                if positions is not None and self._functions.takes_row_starts
                else None,
            )
            self._batches[batch] = found
            if len(self._batches) > _BATCHES_KEPT:
                self._batches.pop(next(iter(self._batches)))
        return found
