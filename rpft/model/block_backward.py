"""The backward of a block: from what autograd recorded of its forward, or as a graph that recomputes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from rpft.model.graphs import TensorFunction
from rpft.model.router_loss import ends_of_backward

Weights = dict[str, torch.Tensor]
"""Tensor name to tensor."""


class Kept(Protocol):
    """What the forward pass of one layer leaves for its backward."""

    def backward(self, grad: torch.Tensor, sums: Weights) -> torch.Tensor | None:
        """Adds weight gradients to ``sums`` (float32, by name); the gradient of the hidden state, where wanted.

        Where the block has a load-balancing loss it is added to one of ``sums`` too: see model/router_loss.py.
        """
        ...


class EagerKept:
    """A forward pass recorded by autograd."""

    def __init__(
        self,
        output: torch.Tensor,
        hidden: torch.Tensor | None,
        leaves: Weights,
        router_loss: torch.Tensor | None = None,
        coefficient: float = 0.0,
    ) -> None:
        self._output, self._hidden, self._leaves = output, hidden, leaves
        self._router_loss, self._coefficient = router_loss, coefficient

    def backward(self, grad: torch.Tensor, sums: Weights) -> torch.Tensor | None:
        wanted = list(self._leaves.values())
        on = self._hidden is not None and self._hidden.requires_grad
        if on:
            assert self._hidden is not None
            wanted.append(self._hidden)
        if not wanted:
            return None
        ends, end_grads = ends_of_backward(self._output, grad, self._router_loss, sums, self._coefficient)
        grads = torch.autograd.grad(ends, wanted, end_grads, allow_unused=True)
        for name, value in zip(self._leaves, grads, strict=False):
            if value is not None:  # an expert without a token has none
                sums[name].add_(value)
        return grads[-1] if on else None


class GraphKept(NamedTuple):
    """The inputs of a backward graph, short of the gradient and the sums."""

    graph_for: Callable[[list[torch.Tensor]], TensorFunction]
    """Gives the graph for tensors like these, made from them where it is not there yet."""
    inputs: list[torch.Tensor]
    trained: tuple[str, ...]

    def backward(self, grad: torch.Tensor, sums: Weights) -> torch.Tensor | None:
        """See ``Kept``."""
        tensors = [*self.inputs, grad, *(sums[name] for name in self.trained)]
        with torch.no_grad():
            result = self.graph_for(tensors)(*tensors)
        return result[0] if len(result) else None
