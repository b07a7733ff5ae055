"""MLPs over a part of the tokens at a time, where what they make of all at once is large.

Between its products an MLP holds tensors several times as wide as the hidden state, in the backward five or six of
them. In parts, they exist for one part at a time: in a traced graph what is recomputed for a part stands next to
the part's backward (model/joint_graph.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from rpft.model.expert_groups import Asked
from rpft.model.probe import Probe

_MOST_BYTES = 1 << 30
"""Of the widest tensor between the products, for all tokens; less is left whole."""

_PART_BYTES = 1 << 29
"""Of that tensor for a part: enough tokens to keep any GPU busy."""

_NO_MLP = (TypeError, ValueError, RuntimeError, AttributeError)
"""Raised by a module that wants more than a hidden state, or gives more."""

_PROBE_TOKENS = 3
_TOLERANCE = 0.02
"""Relative; products of other shapes are rounded otherwise."""


def tokens_left_whole(block: nn.Module, itemsize: int) -> float:
    """Up to how many tokens no MLP of ``block`` would be cut; for that nothing needs to be tried."""
    widths = [width for child in block.children() if (width := _width(child)) is not None]
    return min((_MOST_BYTES // (width * itemsize) for width in widths), default=math.inf)


def run_mlps_in_parts(
    block: nn.Module, hidden_size: int, device: torch.device, dtype: torch.dtype, untried: bool = False
) -> None:
    """Makes every MLP of ``block``, parameters on meta, run in parts where its tensors are large.

    An MLP is a child that has nothing but matrices and vectors, is given one hidden state, and is seen to treat
    every token by itself; or, ``untried``, at least gives a hidden state.
    """
    for child in block.children():
        width = _width(child)
        if width is None:
            continue
        if (_gives_hidden_state if untried else _treats_tokens_alike)(child, hidden_size, device, dtype):
            child.forward = partial(_in_parts, child.forward, width)  # type: ignore[method-assign]


def num_parts(tokens: int, width: int, itemsize: int) -> int:
    """In how many parts ``tokens`` go through an MLP of ``width``."""
    size = tokens * width * itemsize
    return 1 if size <= _MOST_BYTES else -(-size // _PART_BYTES)


def _in_parts(forward: Callable[..., Any], width: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    tokens = hidden.shape[:-1].numel()
    parts = num_parts(tokens, width, hidden.dtype.itemsize)
    if parts == 1 or args or kwargs:
        return forward(hidden, *args, **kwargs)
    flat = hidden.reshape(1, tokens, hidden.shape[-1])
    return torch.cat([forward(part) for part in flat.split(-(-tokens // parts), dim=1)], dim=1).view_as(hidden)


def _width(module: nn.Module) -> int | None:
    """Of the widest tensor inside ``module``; None where it is no MLP."""
    shapes = [p.shape for p in module.parameters()]
    matrices = [shape for shape in shapes if len(shape) == 2]
    experts = any(isinstance(child, (nn.ModuleList, Asked)) for child in module.modules())
    if experts or len(matrices) < 2 or any(len(shape) > 2 for shape in shapes):
        return None
    return max(max(shape) for shape in matrices)


def _gives_hidden_state(module: nn.Module, hidden_size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it makes one hidden state of one, tried without data."""
    with FakeTensorMode():
        own = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in module.named_parameters()}
        hidden = torch.empty(1, _PROBE_TOKENS, hidden_size, dtype=dtype, device=device)
        try:
            with torch.no_grad():
                return functional_call(module, own, (hidden,)).shape == hidden.shape
        except _NO_MLP:
            return False


def _treats_tokens_alike(module: nn.Module, hidden_size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each of some random tokens gives by itself what it gives among the others, with random weights."""
    probe, training = Probe(device, dtype), module.training
    weights, hidden = probe.weights(module), probe.normal(1, _PROBE_TOKENS, hidden_size)
    module.eval()
    try:
        with torch.no_grad():
            whole = functional_call(module, weights, (hidden,))
            single = [functional_call(module, weights, (token,)) for token in hidden.split(1, dim=1)]
            return bool((torch.cat(single, dim=1) - whole).norm() <= _TOLERANCE * whole.norm())
    except _NO_MLP:
        return False
    finally:
        module.train(training)
