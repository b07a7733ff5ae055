"""The compute of one slot: points layers' tensors into the worker's buffers, runs layers, adds up gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rpft.engine.slot import HostBatch, Slot, SlotKind, Task
from rpft.engine.streams import Stream
from rpft.model.functions import DeviceBatch, LayerFunctions, Weights
from rpft.model.layout import LayerLayout
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts


class SlotRun:
    """The compute of one slot, in the compute stream's thread: binds weights, runs layers, adds gradients."""

    def __init__(
        self,
        slot: Slot,
        buffer: torch.Tensor,
        functions: LayerFunctions,
        layouts: list[LayerLayout],
        first_trained: int,
        device_batch: Callable[[HostBatch], DeviceBatch],
    ) -> None:
        """``buffer``: the device's weight buffer, uint8. ``first_trained``: see ``Worker``."""
        self._slot, self._buffer, self._functions, self._layouts = slot, buffer, functions, layouts
        self._first_trained, self._device_batch = first_trained, device_batch
        self._starts = region_starts(layouts, slot.stage)
        self._weights: dict[int, Weights] = {}
        self._leaves: dict[int, Weights] = {}
        self._sums: dict[int, Weights] = {}
        self._losses: list[torch.Tensor] = []

    def begin(self) -> None:
        """Points every layer's tensors into the weight buffer."""
        training = self._slot.kind is not SlotKind.LOSS and self._slot.tasks[0].key is not None
        self._functions.train(training)
        with_gradients = self._slot.kind in (SlotKind.FUSED, SlotKind.BACKWARD)
        for layer in self._slot.stage.layers:
            start = self._starts[layer][0]
            bound, leaves = {}, {}
            for binding in self._layouts[layer].bindings:
                at = start + binding.byte_offset
                num_bytes = math.prod(binding.shape) * binding.dtype.itemsize
                # `data`: a module that sets a weight to itself (peft does) must not count as writing the others.
                tensor = self._buffer[at : at + num_bytes].view(binding.dtype).view(binding.shape).data
                if with_gradients and binding.grad_offset is not None:
                    tensor = tensor.detach().requires_grad_()
                    leaves[binding.name] = tensor
                bound[binding.name] = tensor
            self._weights[layer], self._leaves[layer] = bound, leaves

    def take_gradient_buffer(self, flat: torch.Tensor) -> None:
        """Points every trained tensor's running sum into ``flat``, the slot's float32 gradient buffer."""
        for layer in self._slot.stage.layers:
            start = self._starts[layer][1]
            self._sums[layer] = {
                b.name: flat[start + b.grad_offset : start + b.grad_offset + math.prod(b.shape)].view(b.shape)
                for b in self._layouts[layer].bindings
                if b.grad_offset is not None
            }

    def _run_layers(
        self, layers: range, hidden: torch.Tensor | None, task: Task, kept: dict[int, torch.Tensor] | None
    ) -> torch.Tensor | None:
        batch = self._device_batch(task.batch)
        for layer in layers:
            hidden = self._functions.forward(layer, hidden, self._weights[layer], batch, task.key)
            if kept is not None and layer + 1 in task.outputs:
                kept[layer + 1] = hidden
        return hidden

    def forward(self, task: Task, hidden: torch.Tensor | None, produced: dict[int, torch.Tensor]) -> None:
        """Runs a forward stage; fills ``produced`` with the inputs of the layers in ``task.outputs``."""
        with torch.no_grad():
            self._run_layers(self._slot.stage.layers, hidden, task, produced)

    def loss(self, task: Task, hidden: torch.Tensor | None) -> None:
        """Runs the fused stage without gradients."""
        with torch.no_grad():
            hidden = self._run_layers(self._slot.stage.layers[:-1], hidden, task, None)
        head = self._slot.stage.last
        assert hidden is not None
        self._losses.append(self._functions.loss(hidden, self._weights[head], self._device_batch(task.batch)))

    def backward(
        self,
        task: Task,
        segment: Stage,
        hidden: torch.Tensor | None,
        grad: torch.Tensor | None,
        produced: dict[int, torch.Tensor],
    ) -> None:
        """Runs ``segment`` forward and backward; takes and leaves the running gradient in ``produced[0]``."""
        fused = self._slot.kind is SlotKind.FUSED
        layers = segment.layers[:-1] if fused else segment.layers
        if hidden is not None:
            # Only where a layer below has trained parameters must a gradient go on.
            hidden = hidden.detach().requires_grad_(segment.first > self._first_trained)
        with torch.enable_grad():
            output = self._run_layers(layers, hidden, task, None)
        assert output is not None
        if fused:
            head = segment.last
            batch = self._device_batch(task.batch)
            total, grad, sums = self._functions.loss_and_gradients(
                output, self._weights[head], batch, self._leaves[head], task.key
            )
            self._losses.append(total)
            for name, value in sums.items():
                self._sums[head][name].add_(value)
        elif grad is None:
            grad = produced.pop(0)
        leaves = [(layer, name, leaf) for layer in layers for name, leaf in self._leaves[layer].items()]
        wanted = [leaf for _, _, leaf in leaves]
        needs_input = hidden is not None and hidden.requires_grad
        if needs_input:
            assert hidden is not None
            wanted.append(hidden)
        if not wanted:
            return
        if output is hidden:
            produced[0] = grad
            return
        grads = list(torch.autograd.grad(output, wanted, grad, allow_unused=True))
        if needs_input:
            produced[0] = grads.pop()
        for (layer, name, _), value in zip(leaves, grads, strict=True):
            if value is not None:  # an expert without a token has none
                self._sums[layer][name].add_(value)

    def store_losses(self, target: torch.Tensor, stream: Stream) -> None:
        """Copies the loss sums of the slot's microbatches to host ``target``."""
        for number, loss in enumerate(self._losses):
            stream.uses(loss)
            target[number].copy_(loss, non_blocking=True)
