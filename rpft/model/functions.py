"""The pure functions that a worker runs: embedding, block and head, over weights given from outside.

One ``LayerFunctions`` lives on each worker's device. It holds templates, modules without weights, one a kind of
layer: which weights a call uses is an argument, so that no module is copied and no weight is owned.

Shapes: hidden state [rows, sequence, hidden]; ids, labels and positions [rows, sequence].
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from rpft.model.adapters import caches_parametrizations
from rpft.model.dropout import mix, placed_dropout
from rpft.model.skeleton import (
    EmbeddingStub,
    ShellState,
    Skeleton,
    StopForward,
    kinds_of_blocks,
    replace_module,
    stub_blocks,
)

Weights = dict[str, torch.Tensor]
"""Full tensor name to tensor."""

HEAD_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once: 0.6 GB in float32 at a vocabulary of 150,000."""

_ONE_THREAD = threading.Lock()
"""Held by a forward pass that uses torch's cache of parametrizations, which is one for the whole process."""

_CONTEXTS_KEPT = 4
"""Contexts remembered a worker: unpacked microbatches of one shape share theirs."""


@dataclass(frozen=True)
class DeviceBatch:
    """What a worker needs of one microbatch, on its device; small beside the hidden state."""

    input_ids: torch.Tensor
    """[rows, sequence] int64."""
    position_ids: torch.Tensor | None
    """[rows, sequence] int64, or None: 0, 1, ... in every row."""
    trained_at: torch.Tensor
    """[trained tokens] int64: places in the flattened microbatch whose logits are scored."""
    targets: torch.Tensor
    """[trained tokens] int64: the token that each of them must predict."""


@dataclass(frozen=True)
class BlockCall:
    """Everything but the hidden state that the model passes to one block: masks, rotary tables, positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _TrunkStub(nn.Module):
    """Stands in the place of the trunk in front of the family's own head code."""

    output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class LayerFunctions:
    """The layers 0 (embedding), 1..L (blocks) and L + 1 (head) of one model as functions, on one device."""

    def __init__(self, skeleton: Skeleton, device: torch.device, dtype: torch.dtype) -> None:
        model = skeleton.model
        self.device, self.dtype = device, dtype
        self.num_blocks = skeleton.num_blocks
        self._prefix = skeleton.trunk_path + "."
        self._block_prefixes = [f"{skeleton.blocks_path}.{i}." for i in range(self.num_blocks)]
        self._kinds = kinds_of_blocks(skeleton)
        first_of_kind = [self._kinds.index(kind) for kind in range(max(self._kinds) + 1)]
        self._templates = [self._place(copy.deepcopy(skeleton.blocks[i])) for i in first_of_kind]
        self._caches = [caches_parametrizations(template) for template in self._templates]

        self._state = ShellState(skeleton.returns_tuple)
        self._front = self._place(self._without_blocks(skeleton))
        self._back = self._place(self._without_blocks(skeleton))
        for path in skeleton.embedding_modules:
            stub = EmbeddingStub(path, model.get_submodule(path), dtype)
            replace_module(self._back, path.removeprefix(self._prefix), stub)
        self._trunk = _TrunkStub()
        memo = {id(skeleton.trunk): self._trunk}
        self._causal = self._place(copy.deepcopy(model, memo))
        self._contexts: OrderedDict[Any, tuple[torch.Tensor | None, list[BlockCall]]] = OrderedDict()
        self.train(True)

    def _place(self, module: nn.Module) -> nn.Module:
        """Moves the real buffers of ``module`` to this device; parameters stay on meta."""
        for submodule in module.modules():
            for name, buffer in submodule.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(submodule, name, buffer.to(self.device))
        return module

    def _without_blocks(self, skeleton: Skeleton) -> nn.Module:
        path = skeleton.blocks_path.removeprefix(self._prefix)
        shell = copy.deepcopy(skeleton.trunk, {id(skeleton.blocks): skeleton.blocks})
        stub_blocks(shell, path, self._state)
        return shell

    def train(self, mode: bool) -> None:
        """Switches dropout on or off in every template."""
        for module in (self._front, self._back, self._causal, *self._templates):
            module.train(mode)

    # -- what the model passes to its blocks ---------------------------------------------------------------

    def context(self, batch: DeviceBatch) -> list[BlockCall]:
        """For each block the arguments that the model gives it beside the hidden state."""
        shape = tuple(batch.input_ids.shape)
        key = shape if batch.position_ids is None else (shape, id(batch.position_ids))
        if key in self._contexts:
            self._contexts.move_to_end(key)
            return self._contexts[key][1]
        calls: list[BlockCall] = []

        def record(index: int, hidden: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            calls.append(BlockCall(args, kwargs))
            if index == self.num_blocks - 1:
                raise StopForward(None)
            return hidden

        with torch.no_grad(), placed_dropout(0):  # what a stub of the embedding drops is not kept
            self._run_trunk(self._back, {}, batch, record)
        self._contexts[key] = (batch.position_ids, calls)  # keeps the tensor whose id is the key alive
        if len(self._contexts) > _CONTEXTS_KEPT:
            self._contexts.popitem(last=False)
        return calls

    def _run_trunk(self, shell: nn.Module, weights: Weights, batch: DeviceBatch, action: Any) -> Any:
        self._state.action = action
        kwargs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            kwargs["position_ids"] = batch.position_ids
        try:
            return functional_call(shell, weights, (), kwargs)
        except StopForward as stop:
            return stop.value
        finally:
            self._state.action = None

    def _strip(self, weights: Weights, prefix: str) -> Weights:
        return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}

    # -- the layers ----------------------------------------------------------------------------------------

    def forward(
        self, layer: int, hidden: torch.Tensor | None, weights: Weights, batch: DeviceBatch, key: int | None
    ) -> torch.Tensor:
        """The output of layer 0..L. ``hidden`` is None for layer 0; ``key`` places the dropout (None: off)."""
        place = None if key is None else mix(key, layer)
        if layer == 0:
            with placed_dropout(place):
                return self._embed(weights, batch)
        assert hidden is not None
        call = self.context(batch)[layer - 1]
        template = self._templates[self._kinds[layer - 1]]
        own = self._strip(weights, self._block_prefixes[layer - 1])
        alone = _ONE_THREAD if self._caches[self._kinds[layer - 1]] else nullcontext()
        with placed_dropout(place), alone:
            out = functional_call(template, own, (hidden, *call.args), call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _embed(self, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        def stop(index: int, hidden: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            raise StopForward(hidden)

        return self._run_trunk(self._front, self._strip(weights, self._prefix), batch, stop)

    def _finish(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> Any:
        """The trunk's own output for the last block's ``hidden``: what follows the blocks, up to the head."""

        def hand_over(index: int, ignored: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            return hidden if index == self.num_blocks - 1 else ignored

        return self._run_trunk(self._back, self._strip(weights, self._prefix), batch, hand_over)

    def _logits(self, output: Any, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The family's own head, soft-capping and scaling on final hidden states [tokens, hidden]."""
        self._trunk.output = type(output)(**{**output, "last_hidden_state": hidden.unsqueeze(0)})
        own = {n: w for n, w in weights.items() if not n.startswith(self._prefix)}
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        try:
            return functional_call(self._causal, own, (), {"input_ids": ids, "use_cache": False}).logits[0]
        finally:
            self._trunk.output = None

    def logits(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """Logits [rows, sequence, vocabulary] of the last block's output: for checks on a few tokens."""
        output = self._finish(hidden, weights, batch)
        flat = output.last_hidden_state.flatten(0, 1)
        return self._logits(output, flat, weights).view(*hidden.shape[:2], -1)

    def loss(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """The sum of cross-entropy over the trained tokens, float32 scalar; no gradient is kept."""
        with torch.no_grad():
            output = self._finish(hidden, weights, batch)
            scored = output.last_hidden_state.flatten(0, 1)[batch.trained_at]
            total = torch.zeros((), device=hidden.device)
            for chunk, target in self._chunks(scored, batch.targets):
                total += self._cross_entropy(output, chunk, target, weights)
        return total

    def loss_and_gradients(
        self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch, leaves: Weights, key: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, Weights]:
        """The loss sum, its gradient for ``hidden``, and float32 gradient sums for ``leaves`` (name to weight).

        ``hidden`` is detached. The head runs in chunks of tokens, so that the logits of all tokens never
        exist at once; gradients over chunks are summed in float32.
        """
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), placed_dropout(None if key is None else mix(key, self.num_blocks + 1)):
            output = self._finish(hidden, weights, batch)
            final = output.last_hidden_state
        flat = final.detach().flatten(0, 1)
        grad_flat = torch.zeros_like(flat)
        sums: Weights = {}
        outer = {n: w for n, w in leaves.items() if not n.startswith(self._prefix)}
        total = torch.zeros((), device=hidden.device)
        scored = flat[batch.trained_at]
        grads_scored = []
        for chunk, target in self._chunks(scored, batch.targets):
            chunk = chunk.detach().requires_grad_()
            with torch.enable_grad():
                loss = self._cross_entropy(output, chunk, target, weights)
            grads = torch.autograd.grad(loss, [chunk, *outer.values()], allow_unused=True)
            grads_scored.append(grads[0])
            _add_gradients(sums, outer, grads[1:])
            total += loss.detach()
        if grads_scored:
            grad_flat.index_copy_(0, batch.trained_at, torch.cat(grads_scored))
        inner = {n: w for n, w in leaves.items() if n.startswith(self._prefix)}
        grads = torch.autograd.grad(final, [hidden, *inner.values()], grad_flat.view_as(final), allow_unused=True)
        _add_gradients(sums, inner, grads[1:])
        return total, grads[0], sums

    @staticmethod
    def _chunks(scored: torch.Tensor, targets: torch.Tensor) -> Any:
        return zip(scored.split(HEAD_CHUNK_TOKENS), targets.split(HEAD_CHUNK_TOKENS), strict=True)

    def _cross_entropy(
        self, output: Any, chunk: torch.Tensor, target: torch.Tensor, weights: Weights
    ) -> torch.Tensor:
        return F.cross_entropy(self._logits(output, chunk, weights).float(), target, reduction="sum")


def _add_gradients(sums: Weights, leaves: Weights, grads: Any) -> None:
    for name, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            sums[name] = sums[name].add_(grad) if name in sums else grad.to(torch.float32, copy=True)
