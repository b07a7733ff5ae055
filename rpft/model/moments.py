"""The two moments of a layer's trained parameters: the formats that they can be kept in, in one flat run of bytes.

    fp32   | exp_avg float32 | exp_avg_sq float32 |                               8 bytes a parameter
    bf16   | exp_avg bfloat16 | exp_avg_sq bfloat16 |                             4
    8bit   | exp_avg_scale, exp_avg_sq_scale float32, one a block |
           | exp_avg uint8 | exp_avg_sq uint8 |                                   2 + 8 / BLOCK

A layer's moments are laid out like its gradient, so that a slice of the one belongs to a slice of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rpft.model import dynamic_map
from rpft.model.dropout import draws, halves
from rpft.model.layout import ALIGNMENT_ELEMENTS

StateFormat = Literal["fp32", "bf16", "8bit"]

BLOCK = 256
"""Elements that share a scale (arXiv 2110.02861 has 2048; libraries came to 256). No block has two tensors'."""

assert ALIGNMENT_ELEMENTS % BLOCK == 0, "a block would reach into the next tensor"

_DTYPES: dict[StateFormat, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(frozen=True)
class Moments:
    """Moments of ``n`` parameters; a slice of them is another, over the same memory."""

    format: StateFormat
    exp_avg: Tensor
    """[n] float32, bfloat16, or uint8: numbers of values in ``BLOCK``-wise scaled maps."""
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    """float32 [n / BLOCK] with 8bit, else [0]."""
    exp_avg_sq_scale: Tensor
    first_place: int = 0
    """Of the first parameter among its layer's."""

    def __len__(self) -> int:
        return len(self.exp_avg)

    def __getitem__(self, part: slice) -> Moments:
        """Those of the parameters in ``part``; with 8bit it begins at a block."""
        blocks = self._blocks(part)
        return Moments(
            self.format,
            self.exp_avg[part],
            self.exp_avg_sq[part],
            self.exp_avg_scale[blocks],
            self.exp_avg_sq_scale[blocks],
            self.first_place + (part.start or 0),
        )

    def _blocks(self, part: slice) -> slice:
        if self.format != "8bit":
            return slice(0, 0)
        start, stop, _ = part.indices(len(self))
        assert start % BLOCK == 0, start
        return slice(start // BLOCK, -(-stop // BLOCK))

    def read(self) -> tuple[Tensor, Tensor]:
        """(first, second), float32 [n]: with fp32 the moments themselves, else copies."""
        if self.format == "8bit":
            return _decoded(self.exp_avg, self.exp_avg_scale, True), _decoded(
                self.exp_avg_sq, self.exp_avg_sq_scale, False
            )
        return self.exp_avg.float(), self.exp_avg_sq.float()

    def write(self, first: Tensor, second: Tensor, rounding_key: int) -> None:
        """Stores what ``read`` gave, changed. bfloat16 is rounded to a neighbour by chance, drawn from
        ``rounding_key``, 64 bits, and each parameter's place."""
        if self.format == "bf16":
            places = torch.arange(self.first_place, self.first_place + len(self))
            drawn = draws(places, halves(rounding_key))
            self.exp_avg.copy_(_rounded(first, drawn & 0xFFFF))
            self.exp_avg_sq.copy_(_rounded(second, drawn >> 16))
        elif self.format == "8bit":
            _encode(first, self.exp_avg, self.exp_avg_scale, True)
            _encode(second.clamp(max=torch.finfo().max), self.exp_avg_sq, self.exp_avg_sq_scale, False)


def _rounded(values: Tensor, drawn: Tensor) -> Tensor:
    """bfloat16 of float32 ``values``: the upper neighbour where the lower 16 bits and ``drawn`` carry over."""
    carried = values.view(torch.int32) + torch.where(values.isfinite(), drawn, 0).to(torch.int32)
    return (carried >> 16).to(torch.int16).view(torch.bfloat16)


def _decoded(numbers: Tensor, scales: Tensor, signed: bool) -> Tensor:
    return dynamic_map.values(signed)[numbers.int()] * _by_parameter(scales, len(numbers))


def _encode(values: Tensor, numbers: Tensor, scales: Tensor, signed: bool) -> None:
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales.copy_(padded.abs().amax(1))
    divisors = torch.where(scales == 0, 1.0, scales)
    numbers.copy_(dynamic_map.nearest(values / _by_parameter(divisors, len(values)), signed))


def _by_parameter(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:count]


class Stored(NamedTuple):
    """A part of moments, as it stands in a checkpoint."""

    name: str
    """Of the field of ``Moments``."""
    dtype: torch.dtype
    block: int
    """Parameters that each of its elements belongs to."""


def stored_parts(format: StateFormat) -> list[Stored]:
    """What moments of ``format`` consist of."""
    parts = [Stored(name, _DTYPES[format], 1) for name in ("exp_avg", "exp_avg_sq")]
    if format == "8bit":
        parts += [Stored(name, torch.float32, BLOCK) for name in ("exp_avg_scale", "exp_avg_sq_scale")]
    return parts


def stored_block(format: StateFormat, name: str) -> int:
    """Parameters that each element of the field ``name`` of ``Moments`` belongs to."""
    return next(stored.block for stored in stored_parts(format) if stored.name == name)


def moments_bytes(format: StateFormat, count: int) -> int:
    """Bytes of the moments of ``count`` parameters, exactly."""
    return 2 * (count * _DTYPES[format].itemsize + _scale_bytes(format, count))


def moments_in(buffer: Tensor, format: StateFormat, count: int) -> Moments:
    """The moments of ``count`` parameters that lie in ``buffer``, uint8 [``moments_bytes``]; zeros are zeros."""
    assert buffer.numel() == moments_bytes(format, count)
    dtype, scales = _DTYPES[format], _scale_bytes(format, count)
    first, second, *values = buffer.split([scales, scales, *[count * dtype.itemsize] * 2])
    exp_avg, exp_avg_sq = (value.view(dtype) for value in values)
    return Moments(format, exp_avg, exp_avg_sq, first.view(torch.float32), second.view(torch.float32))


def _scale_bytes(format: StateFormat, count: int) -> int:
    return 4 * -(-count // BLOCK) if format == "8bit" else 0
