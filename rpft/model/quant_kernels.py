"""Quantised parts back to a weight, each as one operation that holds little beside the weight that it makes.

They are operations of their own for every way to run a layer. A graph's compiler could fuse the formulas with what
stands around them, and would: it makes the weight for the recompute and the weight for the gradient in one kernel,
since both read the same parts, and holds all weights of the layer twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from rpft.model.operations import operation
from rpft.model.quant import BLOCK, NESTED_BLOCK

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 24
"""Elements dequantised at once without Triton: enough to fill a GPU, 96 MiB beside the weight."""


@operation(
    "nested_absmax(Tensor index, Tensor absmax, Tensor levels, Tensor offset) -> Tensor",
    lambda index, *_: torch.empty(index.shape, dtype=torch.float32, device=index.device),
)
def nested_absmax(
    index: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """The largest values of blocks, float32 [..., blocks], from their own quantisation.

    ``index`` uint8 [..., blocks]; ``absmax`` [..., nested blocks]; ``levels`` [256]; ``offset`` [..., 1]. Product
    and sum are rounded one after the other, as bitsandbytes does.
    """
    scale = absmax.repeat_interleave(NESTED_BLOCK, -1)[..., : index.shape[-1]]
    return levels.index_select(0, index.flatten().int()).view(index.shape) * scale + offset


@operation(
    "dequantize_blocks(Tensor packed, Tensor absmax, Tensor levels, int[] shape, ScalarType dtype) -> Tensor",
    lambda packed, absmax, levels, shape, dtype: torch.empty(list(shape), dtype=dtype, device=packed.device),
)
def dequantize_blocks(
    packed: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight [*shape] from two 4-bit indices a byte, the first in the upper half, in blocks of 64.

    ``packed`` uint8 [..., elements / 2]; ``absmax`` float32 [..., blocks]; ``levels`` [16].
    """
    result = torch.empty(list(shape), dtype=dtype, device=packed.device)
    kernel = _triton_kernel() if packed.is_cuda else None
    fill = _fill_in_chunks if kernel is None else kernel
    fill(packed.contiguous(), absmax.contiguous(), levels, result)
    return result


FillBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(packed, absmax, levels, result): see ``dequantize_blocks``."""


def _fill_in_chunks(
    packed: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, result: torch.Tensor
) -> None:
    blocks, sources, largest = result.view(-1, BLOCK), packed.view(-1, BLOCK // 2), absmax.view(-1, 1)
    # A byte stands for two levels, which lie in memory as one number of 8 bytes: one look-up a byte.
    pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1).view(torch.int64).flatten()
    step = _CHUNK_ELEMENTS // BLOCK
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        values = pairs.index_select(0, sources[part].flatten().int()).view(torch.float32).view(-1, BLOCK)
        torch.mul(values, largest[part], out=blocks[part])


@functools.cache
def _triton_kernel() -> FillBlocks | None:
    """The same in one pass over memory; None, said once, where Triton does not run."""
    try:
        from rpft.model.quant_triton import fill_blocks

        device = torch.device("cuda")
        packed = torch.zeros(BLOCK // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(16, device=device)
        fill_blocks(packed, scales, scales, torch.empty(BLOCK, dtype=torch.bfloat16, device=device))
    except Exception as error:  # Triton, its compiler and the driver raise many kinds
        logger.warning(
            "weights are dequantised without Triton, in several passes over memory (%s)", str(error).split("\n")[0]
        )
        return None
    return fill_blocks


@operation(
    "dequantize_rows(Tensor values, Tensor? scale, ScalarType dtype) -> Tensor",
    lambda values, scale, dtype: torch.empty(values.shape, dtype=dtype, device=values.device),
)
def dequantize_rows(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``values`` [..., out, in], int8 or float8, times ``scale`` [..., out, 1] if any, rounded once."""
    result = values.to(dtype)  # exact: every value of 8 bits is one of 16 too
    return result if scale is None else result.mul_(scale)
