"""Which part of a block a layer is: the whole, or, where its experts are too many for one layer, some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from rpft.model.slices import ExpertSlice, mark_of, slice_of

_INDEX_BYTES = 2
"""Of a picked expert's number on its way from layer to layer."""


def is_stack(module: nn.Module) -> bool:
    """Whether each parameter of ``module`` holds something of each of ``num_experts``, some of them matrices."""
    own = list(module.parameters())
    count = getattr(module, "num_experts", None)
    return any(p.dim() == 3 for p in own) and all(p.shape[0] == count for p in own)


def is_parameter_adapter(module: nn.Module) -> bool:
    """Whether ``module`` is peft's adapter of a bare parameter, around what has that or another of them."""
    # By name: importing peft takes a second, which a full run has no use for.
    return type(module).__name__ == "ParamWrapper"


@dataclass(frozen=True)
class Stack:
    """The experts of a block, fused to tensors of which each has one slice an expert."""

    path: str
    """Of their module, from the block: where it has adapters, of the outermost of these."""
    num_experts: int
    picked: int
    """To how many of them a token is sent."""
    weights_dtype: torch.dtype
    """Of the weights with which what they make is added up."""

    @property
    def prefix(self) -> str:
        return self.path + "."


class Part(NamedTuple):
    """A layer that is a block or a part of one. In groups its experts follow the rest of it, the front."""

    block: int
    stack: Stack | None = None
    """None for a block that is not cut."""
    experts: range | None = None
    """None for the front, or the whole."""

    @property
    def is_front(self) -> bool:
        return self.stack is not None and self.experts is None

    @property
    def is_first(self) -> bool:
        """Whether it is the first group."""
        return self.experts is not None and self.experts.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the next layer is of another block."""
        return self.experts is None or (self.stack is not None and self.experts.stop == self.stack.num_experts)

    def holds(self, name: str) -> bool:
        """Whether a tensor belongs to it, ``name`` being that in the block."""
        if self.stack is None:
            return True
        return name.startswith(self.stack.prefix) == (self.experts is not None)

    @property
    def mark(self) -> str:
        """What the names of its tensors have at the end, so that they differ from those of the other groups."""
        return "" if self.experts is None else mark_of(self.experts)

    def slice_of(self, name: str) -> ExpertSlice | None:
        """What it has of a tensor that is ``name`` in the block; None: all of it."""
        if self.stack is None or self.experts is None:
            return None
        return slice_of(name, self.experts, self.stack.num_experts)

    def own_name(self, name: str) -> str:
        """Of a tensor that is ``name`` in the block, with its mark or without, that in the module that runs."""
        if self.stack is None or self.experts is None:
            return name
        return name.removeprefix(self.stack.prefix).replace(self.mark, "")

    def extra_elements(self, hidden_size: int) -> int:
        """Elements a token that it is given beyond one hidden state: see model/expert_groups.py."""
        if self.stack is None or self.experts is None:
            return 0
        hidden_states = 1 if self.is_first else 2
        choice = self.stack.picked * (self.stack.weights_dtype.itemsize + _INDEX_BYTES)
        return hidden_states * hidden_size + choice


def parts_of(stacks: Sequence[Stack | None], num_groups: int) -> list[Part]:
    """The layers of some blocks, the experts of each stack in ``num_groups``, which divides their number."""
    parts = []
    for block, stack in enumerate(stacks):
        if stack is None:
            parts.append(Part(block))
            continue
        size = stack.num_experts // num_groups
        groups = [range(start, start + size) for start in range(0, stack.num_experts, size)]
        parts += [Part(block, stack), *(Part(block, stack, experts) for experts in groups)]
    return parts
