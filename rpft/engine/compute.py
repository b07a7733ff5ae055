"""The compute of one slot: finds layers' tensors in the worker's buffers, runs layers, adds up gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rpft.engine.places import Places
from rpft.engine.slot import HostBatch, Slot, SlotKind, Task
from rpft.engine.streams import Stream
from rpft.model.block_backward import Kept, Weights
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.kept import FromForward
from rpft.model.router_loss import LOSS, WEIGHT
from rpft.plan.plan import Stage


@dataclass
class ForwardState:
    """One microbatch on its way through a forward stage."""

    hidden: torch.Tensor | None
    outputs: deque[torch.Tensor] = field(default_factory=deque)
    """Hidden states that are to go down, oldest first."""
    kept: deque[list[tuple[int, torch.Tensor]]] = field(default_factory=deque)
    """What blocks keep for their backward, that is to go down: (byte offset, bytes), a block's at a time."""


@dataclass
class GradientChain:
    """What one microbatch hands on from task to task of a backward slot, down its segments."""

    kept: list[tuple[int, Kept]] = field(default_factory=list)
    """(layer, what its forward left) of the segment at work, in order of layers."""
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each block of the segment what its forward has kept, uint8, if anything."""
    output: torch.Tensor | None = None
    """What the blocks of the fused stage make of its input."""
    grad: torch.Tensor | None = None
    """The gradient for the segment's output; once the segment is done, for its input."""

    def give_copy(self, layer: int, kept: torch.Tensor) -> None:
        """Gives what the forward of ``layer`` has kept, in a buffer that is needed for other things."""
        self.given[layer] = kept.clone()

    def put(self, grad: torch.Tensor) -> None:
        self.grad = grad

    def take(self) -> torch.Tensor:
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad


class SlotRun:
    """The compute of one slot, in the compute stream's thread: finds weights, runs layers, adds gradients."""

    def __init__(
        self,
        slot: Slot,
        buffer: torch.Tensor,
        functions: LayerFunctions,
        places: Places,
        first_trained: int,
        keep_bytes_per_token: int,
        device_batch: Callable[[HostBatch], DeviceBatch],
    ) -> None:
        """``buffer``: the device's weight buffer, uint8. For the rest see ``Worker``."""
        self._slot, self._buffer, self._functions, self._places = slot, buffer, functions, places
        self._first_trained, self._device_batch = first_trained, device_batch
        self._keep_bytes_per_token = keep_bytes_per_token
        self._weights: dict[int, Weights] = {}
        self._sums: dict[int, Weights] = {}
        self._losses: list[torch.Tensor] = []
        self._router_losses = torch.zeros(0)
        """[microbatches, balanced layers of the stage]."""

    def begin(self) -> None:
        """Finds every layer's tensors in the weight buffer."""
        training = self._slot.kind is not SlotKind.LOSS and self._slot.tasks[0].key is not None
        self._functions.train(training)
        self._weights = self._places.weights(self._slot.stage, self._buffer)

    def take_accumulator(self, flat: torch.Tensor) -> None:
        """Finds every trained tensor's running sum in ``flat``, the worker's float32 accumulator."""
        if self._slot.balanced:
            self._router_losses = flat.new_zeros(len(self._slot.tasks), len(self._slot.balanced))
        self._sums = self._places.sums(self._slot.stage, flat)

    def forward(self, task: Task, layers: range, state: ForwardState) -> None:
        """Runs ``layers`` of a forward stage on the hidden state of ``state``; their output is next to go down."""
        for layer in layers:
            if layer in task.kept_outputs:
                state.hidden = self._run_keeping(layer, state, task)
            else:
                state.hidden = self._run_layers(range(layer, layer + 1), state.hidden, task)
        assert state.hidden is not None
        state.outputs.append(state.hidden)

    def _run_keeping(self, layer: int, state: ForwardState, task: Task) -> torch.Tensor:
        assert state.hidden is not None
        output, kept = self._functions.forward_keeping(
            layer,
            state.hidden,
            self._weights[layer],
            self._device_batch(task.batch),
            task.key,
            layer > self._first_trained,
            self._budget_bytes(task),
        )
        state.kept.append(kept)
        return output

    def _budget_bytes(self, task: Task) -> int:
        return self._keep_bytes_per_token * task.batch.input_ids.numel()

    def loss(self, task: Task, hidden: torch.Tensor | None) -> None:
        """Runs the fused stage without gradients."""
        hidden = self._run_layers(self._slot.stage.layers[:-1], hidden, task)
        assert hidden is not None
        weights = self._weights[self._slot.stage.last]
        self._losses.append(self._functions.head.loss(hidden, weights, self._device_batch(task.batch)))

    def _run_layers(self, layers: range, hidden: torch.Tensor | None, task: Task) -> torch.Tensor | None:
        batch = self._device_batch(task.batch)
        with torch.no_grad():
            for layer in layers:
                hidden = self._functions.forward(layer, hidden, self._weights[layer], batch, task.key)
        return hidden

    def recompute(self, task: Task, segment: Stage, hidden: torch.Tensor | None, chain: GradientChain) -> None:
        """Runs the blocks of ``segment`` forward for their backward; in the fused stage, their only forward.

        What their forwards have kept is taken from ``chain``.
        The last block of a recomputed segment may leave its forward to its backward: nobody asks for its output.
        """
        batch = self._device_batch(task.batch)
        fused = self._slot.kind is SlotKind.FUSED
        for layer in segment.layers[:-1] if fused else segment.layers:
            if layer < self._first_trained:
                hidden = self._run_layers(range(layer, layer + 1), hidden, task)
                continue
            buffer = chain.given.pop(layer, None)
            output, kept = self._functions.keep(
                layer,
                hidden,
                self._weights[layer],
                batch,
                task.key,
                frozenset(self._sums[layer]),
                with_grad_hidden=layer > self._first_trained,
                with_output=fused or layer < segment.last,
                given=None if buffer is None else FromForward(self._budget_bytes(task), buffer),
            )
            chain.kept.append((layer, kept))
            # Detached: from layer to layer the gradient is handed on by this class, not by autograd.
            hidden = None if output is None else output.detach()
        chain.output = hidden

    def backward(self, task: Task, chain: GradientChain) -> None:
        """Takes the gradient for the segment's output from ``chain``, sums weight gradients, leaves the next."""
        grad: torch.Tensor | None
        if self._slot.kind is SlotKind.FUSED:
            grad = self._head_backward(task, chain)
        else:
            grad = chain.take()
        while chain.kept:
            layer, kept = chain.kept.pop()
            assert grad is not None
            grad = kept.backward(grad, {**self._sums[layer], **self._router_sums(task, layer)})
        if grad is not None:
            chain.put(grad)

    def _router_sums(self, task: Task, layer: int) -> Weights:
        """Where the router of ``layer`` adds its loss, and how much that of this microbatch weighs."""
        if layer not in self._slot.balanced:
            return {}
        weight = task.batch.trained_tokens / len(self._functions.balanced)
        number = next(i for i, each in enumerate(self._slot.tasks) if each is task)
        place = self._router_losses[number, self._slot.balanced.index(layer)]
        return {LOSS: place, WEIGHT: torch.full_like(place, weight)}

    def _head_backward(self, task: Task, chain: GradientChain) -> torch.Tensor:
        head = self._slot.stage.last
        hidden, chain.output = chain.output, None
        assert hidden is not None
        total, grad = self._functions.head.loss_and_gradients(
            hidden, self._weights[head], self._device_batch(task.batch), self._sums[head], task.key
        )
        self._losses.append(total)
        return grad

    def store_router_losses(self, target: torch.Tensor, stream: Stream) -> None:
        """Copies the losses of the slot's routers to host ``target``."""
        stream.uses(self._router_losses)
        target.copy_(self._router_losses, non_blocking=True)

    def store_losses(self, target: torch.Tensor, stream: Stream) -> None:
        """Copies the loss sums of the slot's microbatches to host ``target``."""
        for number, loss in enumerate(self._losses):
            stream.uses(loss)
            target[number].copy_(loss, non_blocking=True)
