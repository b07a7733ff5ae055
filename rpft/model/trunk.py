"""The model's own code around its blocks: the embedding, what blocks are given, the final norm and the LM head.

Templates without weights, on one device: which weights a call uses is an argument. Shapes as in functions.py.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from rpft.model.block_backward import Weights
from rpft.model.blocks import BlockCall
from rpft.model.device_batch import DeviceBatch
from rpft.model.dropout import placed_dropout
from rpft.model.packed_attention import masks_from
from rpft.model.skeleton import EmbeddingStub, ShellState, Skeleton, StopForward, replace_module, stub_blocks

_CONTEXTS_KEPT = 4
"""Contexts remembered a worker: unpacked microbatches of one shape share theirs."""


class _TrunkStub(nn.Module):
    """Stands in the place of the trunk in front of the family's own head code."""

    output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class Trunk:
    """All of one model but its blocks, as functions."""

    def __init__(self, skeleton: Skeleton, device: torch.device, dtype: torch.dtype) -> None:
        model = skeleton.model
        self.num_blocks = skeleton.num_blocks
        self.prefix = skeleton.trunk_path + "."
        """Of the names of its weights; those of the LM head have another."""
        self._state = ShellState(skeleton.returns_tuple)
        self._front = placed(self._without_blocks(skeleton), device)
        self._back = placed(self._without_blocks(skeleton), device)
        for path in skeleton.embedding_modules:
            stub = EmbeddingStub(path, model.get_submodule(path), dtype)
            replace_module(self._back, path.removeprefix(self.prefix), stub)
        self._stub = _TrunkStub()
        memo = {id(skeleton.trunk): self._stub}
        self._causal = placed(copy.deepcopy(model, memo), device)
        self._contexts: OrderedDict[Any, tuple[torch.Tensor | None, list[BlockCall]]] = OrderedDict()
        self.training = False

    def _without_blocks(self, skeleton: Skeleton) -> nn.Module:
        path = skeleton.blocks_path.removeprefix(self.prefix)
        shell = copy.deepcopy(skeleton.trunk, {id(skeleton.blocks): skeleton.blocks})
        stub_blocks(shell, path, self._state)
        return shell

    def train(self, mode: bool) -> None:
        """Switches dropout on or off."""
        self.training = mode
        for module in (self._front, self._back, self._causal):
            module.train(mode)

    @property
    def attention(self) -> str:
        """What transformers knows the attention of the model by."""
        return self._causal.config._attn_implementation  # type: ignore[union-attr, return-value]

    def attend_by(self, name: str) -> None:
        """Makes blocks be given what the attention takes that transformers knows by ``name``."""
        for module in (self._front, self._back, self._causal):
            attend_by(module, name)
        self._contexts.clear()

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

        # What a stub of the embedding drops is not kept.
        with torch.no_grad(), placed_dropout(0), masks_from(batch.row_starts):
            self._run(self._back, {}, batch, record)
        self._contexts[key] = (batch.position_ids, calls)  # keeps the tensor whose id is the key alive
        if len(self._contexts) > _CONTEXTS_KEPT:
            self._contexts.popitem(last=False)
        return calls

    def _run(self, shell: nn.Module, weights: Weights, batch: DeviceBatch, action: Any) -> Any:
        self._state.action = action
        kwargs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            kwargs["position_ids"] = batch.position_ids
        try:
            return functional_call(shell, self._own(weights), (), kwargs)
        except StopForward as stop:
            return stop.value
        finally:
            self._state.action = None

    def _own(self, weights: Weights) -> Weights:
        """Those of the trunk, by the names that they have in it."""
        return {n.removeprefix(self.prefix): w for n, w in weights.items() if n.startswith(self.prefix)}

    # -- in front of the blocks, and behind them -----------------------------------------------------------

    def embed(self, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """What the first block is given."""

        def stop(index: int, hidden: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            raise StopForward(hidden)

        return self._run(self._front, weights, batch, stop)

    def finish(
        self, hidden: torch.Tensor, weights: Weights, ids: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """From the last block's output to what the head is given: final hidden states [tokens, hidden].

        ``weights`` are those of the trunk, by full name.
        """

        def hand_over(index: int, ignored: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            return hidden if index == self.num_blocks - 1 else ignored

        output = self._run(self._back, weights, DeviceBatch(ids, positions, ids, ids), hand_over)
        others = {name: value for name, value in output.items() if name != "last_hidden_state"}
        assert not any(isinstance(value, torch.Tensor) for value in others.values())
        self._output = type(output), others
        return output.last_hidden_state.flatten(0, 1)

    def head_logits(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The family's own head, soft-capping and scaling, on final hidden states [tokens, hidden]."""
        kind, others = self._output
        self._stub.output = kind(**others, last_hidden_state=hidden.unsqueeze(0))
        own = {n: w for n, w in weights.items() if not n.startswith(self.prefix)}
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        try:
            return functional_call(self._causal, own, (), {"input_ids": ids, "use_cache": False}).logits[0]
        finally:
            self._stub.output = None

    def logits(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """Logits [rows, sequence, vocabulary] of the last block's output: for checks on a few tokens."""
        final = self.finish(hidden, weights, batch.input_ids, batch.position_ids)
        return self.head_logits(final, weights).view(*hidden.shape[:2], -1)


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` with its real buffers moved to ``device``; parameters stay on meta."""
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(submodule, name, buffer.to(device))
    return module


def attend_by(module: nn.Module, name: str) -> None:
    """Makes all attention inside of ``module`` the one that transformers knows by ``name``."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = name  # type: ignore[union-attr]
