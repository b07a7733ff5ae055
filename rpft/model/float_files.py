"""Weights in FP8 or MXFP4, as models are published in them, of which the values are read: names and factors.

FP8 (DeepSeek-V3, Qwen3): beside NAME, float8 [out, in], stands NAME_scale_inv with a factor for each block of
``weight_block_size``. MXFP4 (GPT-OSS): a stack of experts NAME, [experts, in, out], lies as NAME_blocks, uint8
[experts, out, in / 32, 16] with two elements a byte, the first in the low half, and NAME_scales, uint8
[experts, out, in / 32]: powers of two, 127 standing for 1 (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rpft.errors import UserError

_SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_OF_ONE = 127


@dataclass(frozen=True)
class FloatWeights:
    """Such weights of a checkpoint, by name, and which of its tensors are only parts of them."""

    fp8: frozenset[str]
    mxfp4: frozenset[str]
    """None of which stands in the files by its own name."""
    parts: frozenset[str]


def find_float_weights(names: Iterable[str]) -> FloatWeights:
    """What of ``names`` are weights in FP8 or MXFP4."""
    every = frozenset(names)
    fp8 = frozenset(n.removesuffix(_SCALE) for n in every if n.endswith(_SCALE)) & every
    mxfp4 = frozenset(n.removesuffix(BLOCKS) for n in every if n.endswith(BLOCKS))
    mxfp4 = frozenset(name for name in mxfp4 if name + SCALES in every)
    parts = {name + _SCALE for name in fp8} | {name + end for name in mxfp4 for end in (BLOCKS, SCALES)}
    return FloatWeights(fp8, mxfp4, frozenset(parts))


def is_read(settings: dict[str, Any]) -> bool:
    """Whether ``quantization_config`` of a checkpoint says one of the two."""
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "fp8":
        return (
            isinstance(block, (list, tuple)) and len(block) == 2 and settings.get("expert_dtype", "fp8") == "fp8"
        )
    return method == "mxfp4"


def scale_of(name: str) -> str:
    """The name of the factors of an FP8 weight."""
    return name + _SCALE


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], where: str) -> torch.Tensor:
    """float32 [out, in]; UserError where there are not as many factors as blocks."""
    (rows, columns), (block_rows, block_columns) = weight.shape, block
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    if tuple(scale.shape) != expected:
        raise UserError(f"{where}: its factors are {list(scale.shape)}, and its blocks {list(expected)}")
    made = torch.empty(rows, columns, dtype=torch.float32)
    pieces = zip(made.split(block_rows), weight.split(block_rows), scale.float(), strict=True)
    for target, source, factors in pieces:
        target.copy_(source)
        target.mul_(factors.repeat_interleave(block_columns)[:columns])
    return made


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [in, out] of one expert: ``blocks`` [out, in / 32, 16], ``scales`` [out, in / 32]."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_OF_ONE
    return torch.ldexp(values[halves.int()], exponents).flatten(1).T.contiguous()
