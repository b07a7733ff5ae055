"""The compute of one slot: points layers' tensors into the worker's buffers, runs layers, adds up gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rpft.engine.slot import HostBatch, Slot, SlotKind, Task
from rpft.engine.streams import Stream
from rpft.model.functions import DeviceBatch, LayerFunctions, Weights
from rpft.model.layout import LayerLayout
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts


@dataclass
class GradientChain:
    """What one microbatch hands on from task to task of a backward slot, down its segments."""

    hidden: torch.Tensor | None = None
    """The input of the segment at work, a leaf."""
    output: torch.Tensor | None = None
    """What the segment makes of it, with its graph."""
    grad: torch.Tensor | None = None
    """The gradient for ``output``; once the segment is done, for ``hidden``."""

    def put(self, grad: torch.Tensor) -> None:
        self.grad = grad

    def take(self) -> torch.Tensor:
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad


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
                # `data`: a module that sets a weight to itself (peft does) must not count as writing the others.
                tensor = binding.view_in(self._buffer, start + binding.byte_offset).data
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
                b.name: flat[start + b.grad_offset : start + b.grad_offset + b.num_elements].view(b.shape)
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

    def recompute(self, task: Task, segment: Stage, hidden: torch.Tensor | None, chain: GradientChain) -> None:
        """Runs the blocks of ``segment`` forward with a graph; in the fused stage this is their only forward."""
        if hidden is not None:
            # Only where a layer below has trained parameters must a gradient go on.
            hidden = hidden.detach().requires_grad_(segment.first > self._first_trained)
        with torch.enable_grad():
            chain.output = self._run_layers(self._blocks(segment), hidden, task, None)
        chain.hidden = hidden

    def backward(self, task: Task, segment: Stage, chain: GradientChain) -> None:
        """Takes the gradient for the segment's output from ``chain``, sums weight gradients, leaves the next."""
        if self._slot.kind is SlotKind.FUSED:
            chain.put(self._head_backward(task, chain))
        output, hidden, grad = chain.output, chain.hidden, chain.take()
        chain.output = chain.hidden = None
        assert output is not None
        if output is hidden:  # the fused stage is the head alone
            chain.put(grad)
            return
        leaves = [(layer, name, w) for layer in self._blocks(segment) for name, w in self._leaves[layer].items()]
        wanted = [leaf for _, _, leaf in leaves]
        if hidden is not None and hidden.requires_grad:
            wanted.append(hidden)
        if not wanted:
            return
        grads = torch.autograd.grad(output, wanted, grad, allow_unused=True)
        if len(grads) > len(leaves):
            chain.put(grads[-1])
        for (layer, name, _), value in zip(leaves, grads, strict=False):
            if value is not None:  # an expert without a token has none
                self._sums[layer][name].add_(value)

    def _blocks(self, segment: Stage) -> range:
        """The layers of a segment but the head, which the fused stage ends with."""
        return segment.layers[:-1] if self._slot.kind is SlotKind.FUSED else segment.layers

    def _head_backward(self, task: Task, chain: GradientChain) -> torch.Tensor:
        head = self._slot.stage.last
        assert chain.output is not None
        total, grad, sums = self._functions.loss_and_gradients(
            chain.output, self._weights[head], self._device_batch(task.batch), self._leaves[head], task.key
        )
        self._losses.append(total)
        for name, value in sums.items():
            self._sums[head][name].add_(value)
        return grad

    def store_losses(self, target: torch.Tensor, stream: Stream) -> None:
        """Copies the loss sums of the slot's microbatches to host ``target``."""
        for number, loss in enumerate(self._losses):
            stream.uses(loss)
            target[number].copy_(loss, non_blocking=True)
