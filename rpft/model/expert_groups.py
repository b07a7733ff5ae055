"""A block cut between its experts: a front, which is all but them, and groups of them, each a layer of its own.

What they make is added to the residual, so that it need not be made at once. From layer to layer travel, a token:

    front -> | block's output without experts | what experts are given | choice |
    group -> |        "                       |        "               |   "    | sum of the groups so far |
    last group -> block's output

The choice is the weights and the numbers of the picked experts, counted from the first expert of the group that is
given them. They travel as their bytes, a byte an element, which is a small number and survives in any precision;
so do the weights' gradients on their way back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rpft.model.parts import Part, Stack
from rpft.model.skeleton import Skeleton, kinds_of_blocks, replace_module
from rpft.model.slices import slice_of

_INDEX = torch.int16


def kinds_of_parts(skeleton: Skeleton) -> list[int]:
    """For each layer between embedding and head the number of its kind; those of one kind share a template."""
    blocks, known = kinds_of_blocks(skeleton), dict[tuple[Any, ...], int]()
    kinds = []
    for part in skeleton.parts:
        of_experts = None if part.experts is None else (part.is_first, part.is_last, len(part.experts))
        kinds.append(known.setdefault((blocks[part.block], of_experts), len(known)))
    return kinds


def template_of(skeleton: Skeleton, part: Part) -> nn.Module:
    """A module of its own that runs ``part``, parameters on meta."""
    block = skeleton.blocks[part.block]
    if part.stack is not None and part.experts is not None:
        return group_of(block.get_submodule(part.stack.path), part)
    template = copy.deepcopy(block)
    if part.stack is not None:
        make_front(template, part.stack)
    return template


def example_input(hidden: torch.Tensor, part: Part) -> torch.Tensor:
    """What the group ``part`` could be given for random ``hidden`` states: an even load of all experts."""
    stack = part.stack
    assert stack is not None
    assert part.experts is not None
    tokens = hidden.shape[:-1].numel()
    indices = torch.rand(tokens, stack.num_experts, device=hidden.device).topk(stack.picked).indices
    weights = torch.full(indices.shape, 1 / stack.picked, dtype=stack.weights_dtype, device=hidden.device)
    total = None if part.is_first else torch.zeros_like(hidden)
    return _joined(hidden, hidden, weights, indices - part.experts.start, total)


def make_front(block: nn.Module, stack: Stack) -> None:
    """Makes ``block``, a copy that nothing else uses, give what the first group of its experts takes."""
    asked, whole = Asked(), block.forward
    replace_module(block, stack.path, asked)

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.calls.clear()
        output = whole(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        ((given, indices, weights),) = asked.calls
        asked.calls.clear()
        return _joined(output, given.view_as(output), weights, indices)

    block.forward = forward  # type: ignore[method-assign]


def group_of(experts: nn.Module, part: Part) -> nn.Module:
    """The module, parameters on meta, of the group ``part`` of a stack, which is left as it is."""
    assert part.stack is not None
    assert part.experts is not None
    stack, count = part.stack, len(part.experts)
    module: Any = resized(experts, stack.num_experts, count)
    run = module.forward

    def forward(wide: torch.Tensor) -> torch.Tensor:
        output, given, total, weights, indices = _apart(wide, stack, with_total=not part.is_first)
        own = torch.where((indices < 0) | (indices >= count), count, indices).long()
        made = run(given.flatten(0, -2), own.flatten(0, -2), weights.flatten(0, -2)).view_as(output)
        total = made if total is None else total + made
        if part.is_last:
            return output + total
        return _joined(output, given, weights, indices - count, total)

    module.forward = forward
    return module


def resized(experts: Any, count: int, other: int, size_of: Callable[[int], int] = lambda size: size) -> Any:
    """A copy of a stack of ``count`` experts, adapters included, with ``other`` experts of other sizes.

    It takes no heed of experts which it has not.
    """
    module = copy.deepcopy(experts)
    for name, parameter in experts.named_parameters():
        shape = slice_of(name, range(other), count).resized(parameter.shape, size_of)
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        replaced = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, replaced)
    for each in (each for each in module.modules() if hasattr(each, "num_experts")):
        each.num_experts = other
        # Some versions of transformers skip what is beyond the last only where experts are known to be spread.
        each._is_expert_parallel = True
    return module


class Asked(nn.Module):
    """In the place of experts: takes note of what they are asked, and gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, ...]] = []
        """Hidden states [tokens, hidden], indices and weights [tokens, picked] of each call."""

    def forward(self, *asked: torch.Tensor) -> torch.Tensor:
        self.calls.append(asked)
        return torch.zeros_like(asked[0])


def _joined(
    output: torch.Tensor,
    given: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype, lead = output.dtype, output.shape[:-1]
    choice = [_Sent.apply(weights, dtype), _numbers(indices.to(_INDEX), dtype)]
    parts = [output, given, *([] if total is None else [total])]
    return torch.cat([*parts, *(part.view(*lead, -1) for part in choice)], -1)


def _apart(wide: torch.Tensor, stack: Stack, with_total: bool) -> tuple[Any, ...]:
    """(output, given, total, weights, indices) of what a group is given."""
    choice = [stack.picked * dtype.itemsize for dtype in (stack.weights_dtype, _INDEX)]
    states = 3 if with_total else 2
    hidden = (wide.shape[-1] - sum(choice)) // states
    *parts, weights, indices = torch.split(wide, [*[hidden] * states, *choice], -1)
    output, given, total = [*parts, None][:3]
    return output, given, total, _Received.apply(weights, stack.weights_dtype), _values(indices, _INDEX)


def _numbers(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of ``values``, each an element of ``dtype``."""
    return values.contiguous().view(torch.uint8).to(dtype)


def _values(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What ``_numbers`` was given."""
    return numbers.to(torch.uint8).contiguous().view(dtype)


class _Sent(torch.autograd.Function):
    """Values as the numbers of their bytes; their gradient comes in the same form."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = values.dtype
        return _numbers(values, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _values(grads[0], ctx.dtype), None


class _Received(torch.autograd.Function):
    """The inverse of ``_Sent``."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = numbers.dtype
        return _values(numbers, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _numbers(grads[0], ctx.dtype), None
