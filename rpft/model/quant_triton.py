"""The Triton kernel that makes a weight of nf4 parts, in one pass over memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_ELEMENTS = 4096
"""Elements of one program."""


@triton.jit
def _blocks(packed, absmax, levels, result, count, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    byte = tl.load(packed + at // 2, mask=inside, other=0)
    index = tl.where(at % 2 == 0, byte >> 4, byte & 15).to(tl.int32)
    value = tl.load(levels + index) * tl.load(absmax + at // 64, mask=inside, other=0.0)
    tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)


def fill_blocks(packed: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, result: torch.Tensor) -> None:
    """See ``rpft.model.quant_kernels.dequantize_blocks``; everything is contiguous."""
    count = result.numel()
    with torch.cuda.device(result.device) if result.is_cuda else nullcontext():
        launch: Any = _blocks[(triton.cdiv(count, _ELEMENTS),)]  # type: ignore[index]
        launch(packed, absmax, levels, result, count, ELEMENTS=_ELEMENTS)
