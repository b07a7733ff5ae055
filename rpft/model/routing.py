"""The choices of routers: found ahead, recorded in a forward pass, and made again as they were in its recompute.

A router picks experts by ``torch.topk``, whatever the family. Another kernel may round otherwise what it picks
by, and a token on the edge would then go to other experts in the recompute than in the forward. So the picked
indices travel from the forward to the backward, one byte each where there are up to 256 experts. The picked values
are read again at these indices: they have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rpft.model.graphs import quiet_fakes
from rpft.model.layout import ALIGNMENT_BYTES, align

Choices = tuple[int, ...]
"""Bytes a token of each ``torch.topk`` that a block calls, in order; 0 for one that is not recorded."""

PROBE_TOKENS = 37
"""Tokens of a row with which blocks are looked at: what picks out of as many picks tokens, not experts."""


class _Call(NamedTuple):
    """One call of ``torch.topk``."""

    number: int
    """Of the call, from 0."""
    options: int
    """What it picks from."""
    shape: torch.Size
    """Of the picked indices."""
    pick: Callable[[], torch.Tensor]
    """Gives the indices."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds the indices."""
        return torch.uint8 if self.options <= 1 << 8 else torch.int16 if self.options <= 1 << 15 else torch.int32

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Routing(TorchFunctionMode):
    """Hands the choices of the calling thread to ``choose``, which gives indices or None to leave torch alone."""

    def __init__(self, choose: Callable[[_Call], torch.Tensor | None]) -> None:
        super().__init__()
        self._choose, self._calls = choose, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        values, k, dim = _what_is_picked(*args, **kwargs)
        shape = list(values.shape)
        options, shape[dim] = shape[dim], k
        call = _Call(self._calls, options, torch.Size(shape), lambda: func(*args, **kwargs)[1])
        self._calls += 1
        stored = self._choose(call)
        if stored is None:
            return func(*args, **kwargs)
        indices = stored.long()
        return torch.return_types.topk((_Picked.apply(values, indices, dim), indices))


def _what_is_picked(input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **named: Any) -> Any:
    """Of the arguments of ``torch.topk``, given by place or by name: from what, how many, in which dimension."""
    return input, k, dim


class _Picked(torch.autograd.Function):
    """Values at indices that differ from one another; the gradient has the bits of that of ``torch.topk``."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.dim = values.shape, dim
        return values.gather(dim, indices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).scatter(ctx.dim, indices, grads[0]), None, None


@contextmanager
def recorded_choices(choices: Choices) -> Iterator[list[torch.Tensor]]:
    """Gives a list that takes the indices which routers of this thread pick inside, in their order."""
    made: list[torch.Tensor] = []

    def choose(call: _Call) -> torch.Tensor | None:
        if not _is_recorded(choices, call):
            return None
        made.append(call.pick().to(call.dtype))
        return made[-1]

    with _watched(choices, choose):
        yield made


@contextmanager
def replayed_choices(choices: Choices, buffer: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Routers of this thread pick inside what lies in ``buffer``, uint8, one recorded choice behind the other.

    Gives the same list as ``recorded_choices``.
    """
    offset = 0
    made: list[torch.Tensor] = []

    def choose(call: _Call) -> torch.Tensor | None:
        nonlocal offset
        if not _is_recorded(choices, call):
            return None
        found = buffer[offset : offset + call.num_bytes].view(call.dtype).view(call.shape)
        offset = align(offset + call.num_bytes, ALIGNMENT_BYTES)
        made.append(found)
        return found

    with _watched(choices, choose):
        yield made


def _watched(choices: Choices, choose: Callable[[_Call], torch.Tensor | None]) -> AbstractContextManager[Any]:
    """Where nothing is recorded torch is left alone: to watch costs time at all that a block calls."""
    return _Routing(choose) if any(choices) else nullcontext()


def _is_recorded(choices: Choices, call: _Call) -> bool:
    return call.number < len(choices) and choices[call.number] > 0


def find_choices(block: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> Choices:
    """What of the choices of ``block`` is to be recorded; nothing is computed, and its weights may be missing.

    ``hidden``: [rows, PROBE_TOKENS, hidden] of any values; ``args``, ``kwargs``: what the model gives the block.
    What picks tokens, to attend to, is not recorded: it picks from as many as there are.
    """
    tokens = hidden.shape[:2].numel()
    found: list[int] = []

    def choose(call: _Call) -> None:
        of_tokens = call.options == PROBE_TOKENS or call.shape.numel() % tokens
        found.append(0 if of_tokens else call.num_bytes // tokens)

    fake = FakeTensorMode()

    def faked(leaf: Any) -> Any:
        return fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    tensors, like = [*block.named_parameters(), *block.named_buffers()], hidden.dtype
    try:
        with torch.no_grad(), quiet_fakes(), fake, _Routing(choose):
            own = {n: torch.empty(t.shape, dtype=like if t.is_floating_point() else t.dtype) for n, t in tensors}
            inputs = pytree.tree_map(faked, ((hidden, *args), kwargs))
            functional_call(block, own, *inputs)
    except Exception:  # what a block does with its experts may depend on values; by then they are chosen
        pass
    return tuple(found) if any(found) else ()
