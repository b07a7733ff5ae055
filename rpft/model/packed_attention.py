"""Attention over packed rows without a mask: flash attention that is told where each row starts.

A mask of a line of S tokens has S x S entries, and the kernels that take one compute all of them. transformers
lets a model's attention and masks be given by name; here both are, so that the model's own code runs as it is. In
the place of the mask its blocks are given where the rows start. Where lines hold one row each, all is as before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "rpft_packed"
"""What transformers knows the attention and the masks of this module by."""

_TOKENS_A_ROW = 128
"""A graph is made for a number of rows; up to one for so many tokens it is the same."""

_here = threading.local()


class Unfit(Exception):
    """The attention of a model asks for something that the kernel lacks."""


def row_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Where rows start in the flattened microbatch, and its end as often as fills up the tensor: int32 [n].

    ``position_ids``: int64 [lines, sequence] on the CPU, 0 where a row starts. n - 1 is a power of two.
    """
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    size = max(1, flat.numel() // _TOKENS_A_ROW)
    size = 1 << (max(size, len(starts)) - 1).bit_length()
    result = torch.full((size + 1,), flat.numel(), dtype=torch.int32)
    result[: len(starts)] = starts
    return result


@contextmanager
def masks_from(starts: torch.Tensor | None) -> Iterator[None]:
    """Gives the blocks of a model whose trunk runs inside ``starts`` for their masks; None: masks as with sdpa.

    Outside of this no masks are made: the trunk then runs for what lies in front of its blocks or behind them.
    """
    _here.starts = starts
    try:
        yield
    finally:
        del _here.starts


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """What transformers asks for instead of a mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if not hasattr(_here, "starts"):
        return None
    if _here.starts is not None:
        return _here.starts
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [lines, heads, sequence, size]; the output [lines, sequence, ...].

    ``attention_mask``: starts of rows, or what ``sdpa`` is given.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or attention_mask.dim() != 1:
        return sdpa_attention_forward(  # type: ignore[return-value]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise Unfit(f"the kernel knows no {name}")
    if dropout > 0.0:
        raise Unfit("the kernel would draw dropout of its own")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise Unfit("keys and values differ in size")
    lines, _, sequence, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < sequence else None
    output = varlen_attention(query, key, value, attention_mask, sequence, scaling, window)
    return output.unflatten(0, (lines, sequence)), None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of each row to itself, [tokens, heads, size] each; keys may have fewer heads.

    ``starts``: see ``row_starts``. ``longest``: of the rows at most. ``window``: tokens that one sees at most,
    itself included; None: all. torch's public function for this came with 2.10 and has no window in all versions.
    """
    left = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale, **left
    )[0]


def register() -> None:
    """Makes ``NAME`` known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
