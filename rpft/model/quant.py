"""How a frozen weight is stored in fewer bits: its parts, how they are made of it, and what they take.

nf4    blocks of 64 elements, each a largest absolute value times one of 16 levels (Dettmers et al., QLoRA, arXiv
       2305.14314); the largest values are themselves stored in 8 bits, in blocks of 256 (double quantisation).
       4.13 bits an element. The format, the bits and the names of the parts are those of bitsandbytes.
int8   a float32 scale a row, 8 bits an element, symmetric: torchao's weight-only format.
fp8    likewise in float8 (e4m3): torchao's.

A weight of three dimensions, of fused experts, is a stack of weights that are stored each for itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rpft.model import dynamic_map

QuantKind = Literal["nf4", "int8", "fp8"]

BLOCK = 64
"""Elements that share a largest absolute value (nf4)."""

NESTED_BLOCK = 256
"""Largest values that share one of their own."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements that are quantised at once: what that holds in float32 stays small beside a weight."""

# The quantiles of a normal distribution, zero among them, scaled to [-1, 1] (QLoRA, appendix E).
_NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

Parts = dict[str, torch.Tensor]
"""Suffix to tensor: ``""`` holds the elements, the others what scales them."""


@dataclass(frozen=True)
class PackedWeight:
    """What of a quantised weight is known without its bits."""

    kind: QuantKind
    shape: tuple[int, ...]
    """[out, in], or [experts, out, in]."""
    dtype: torch.dtype
    """Working precision, to which it is dequantised."""
    nested: bool = True
    """nf4: whether the largest values are in 8 bits. Some checkpoints hold them in float32."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def leading(self) -> tuple[int, ...]:
        """(experts,) or ()."""
        return self.shape[:-2]

    @property
    def num_blocks(self) -> int:
        """Blocks of one matrix (nf4)."""
        return self.shape[-2] * self.shape[-1] // BLOCK

    @property
    def num_bytes(self) -> int:
        """Once dequantised."""
        return self.num_elements * self.dtype.itemsize

    def part_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Suffix of each part's name to (shape, dtype)."""
        lead = self.leading
        if self.kind != "nf4":
            dtype = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
            return {"": (self.shape, dtype), ".scale": ((*self.shape[:-1], 1), torch.float32)}
        shapes = {
            "": ((*lead, self.num_blocks * BLOCK // 2), torch.uint8),
            ".absmax": ((*lead, self.num_blocks), torch.uint8 if self.nested else torch.float32),
            ".quant_map": ((16,), torch.float32),
        }
        if self.nested:
            shapes |= {
                ".nested_absmax": ((*lead, -(-self.num_blocks // NESTED_BLOCK)), torch.float32),
                ".nested_quant_map": ((256,), torch.float32),
                ".nested_offset": ((*lead, 1), torch.float32),
            }
        return shapes

    def of_experts(self, experts: range) -> PackedWeight:
        """Some of a stack of weights."""
        return replace(self, shape=(len(experts), *self.shape[1:]))

    def parts_of_experts(self, experts: range, parts: Parts) -> Parts:
        """Of the ``parts`` of a stack those of some of its weights."""
        return {
            suffix: part if _is_shared(suffix) else part[experts.start : experts.stop]
            for suffix, part in parts.items()
        }

    def expert(self, number: int, parts: Parts) -> tuple[PackedWeight, Parts]:
        """One of a stack of weights by itself, and its part of ``parts``."""
        own = {suffix: part if _is_shared(suffix) else part[number] for suffix, part in parts.items()}
        return replace(self, shape=self.shape[1:]), own

    def quantize_into(self, value: torch.Tensor, parts: Parts) -> None:
        """Fills ``parts``, shaped as ``part_shapes`` says, with ``value`` [*shape] of any float dtype."""
        quantize = {"nf4": _quantize_nf4, "int8": _quantize_int8, "fp8": _quantize_fp8}[self.kind]
        shared = {suffix for suffix in parts if _is_shared(suffix)}
        for suffix in shared:
            parts[suffix].copy_(nf4_levels() if suffix == ".quant_map" else nested_levels())
        own = {suffix: part for suffix, part in parts.items() if suffix not in shared}
        if not self.leading:
            quantize(value, own)
            return
        for number in range(self.shape[0]):
            quantize(value[number], {suffix: part[number] for suffix, part in own.items()})


def _is_shared(suffix: str) -> bool:
    """Whether all matrices of a weight have this part in common."""
    return suffix.endswith("quant_map")


def is_packable(kind: QuantKind, shape: tuple[int, ...]) -> bool:
    """Whether a weight of ``shape`` can be stored as ``kind``: nf4 asks for whole blocks in each matrix."""
    return len(shape) in (2, 3) and (kind != "nf4" or shape[-2] * shape[-1] % BLOCK == 0)


@functools.cache
def nf4_levels() -> torch.Tensor:
    """The 16 levels, float32, ascending."""
    return torch.tensor(_NF4_LEVELS)


@functools.cache
def nested_levels() -> torch.Tensor:
    """The 256 levels of the largest values, float32, ascending: the signed map of 8-bit optimizer states."""
    return dynamic_map.values(signed=True).sort().values


def _quantize_nf4(matrix: torch.Tensor, parts: Parts) -> None:
    flat, packed = matrix.reshape(-1), parts[""]
    absmax = torch.empty(flat.numel() // BLOCK)
    middles = _middles(nf4_levels())

    def quantize(start: int, stop: int) -> None:
        blocks = flat[start:stop].float().view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        absmax[start // BLOCK : stop // BLOCK] = largest
        index = torch.bucketize(_scaled(blocks, largest), middles, out_int32=True).to(torch.uint8).view(-1, 2)
        packed[start // 2 : stop // 2] = index[:, 0] << 4 | index[:, 1]

    _in_chunks(flat.numel(), quantize)
    if ".nested_absmax" not in parts:
        parts[".absmax"].copy_(absmax)
        return
    # The largest values are all positive: around their mean they use the levels of both signs.
    offset = absmax.mean()
    centred = absmax - offset
    missing = -len(centred) % NESTED_BLOCK
    blocks = torch.nn.functional.pad(centred, (0, missing)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(1)
    index = torch.bucketize(_scaled(blocks, largest), _middles(nested_levels()), out_int32=True)
    parts[".absmax"].copy_(index.view(-1)[: len(absmax)])
    parts[".nested_absmax"].copy_(largest)
    parts[".nested_offset"].copy_(offset)


def _scaled(blocks: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """``blocks`` [n, size] in units of ``largest`` [n], from -1 to 1; zeros where that is 0."""
    return (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)


def _middles(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _quantize_int8(matrix: torch.Tensor, parts: Parts) -> None:
    rows, width = parts[""], matrix.shape[1]

    def quantize(start: int, stop: int) -> None:
        part = slice(start // width, stop // width)
        some = matrix[part]
        # In the precision of the weight, as torchao does: 127.5 steps, of which 127 are reached.
        scale = (some.abs().amax(1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
        scale = scale.to(torch.float32)
        parts[".scale"][part] = scale
        rows[part] = (some * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8)

    _in_chunks(matrix.numel(), quantize, width)


def _quantize_fp8(matrix: torch.Tensor, parts: Parts) -> None:
    rows, width = parts[""], matrix.shape[1]
    most = torch.finfo(torch.float8_e4m3fn).max

    def quantize(start: int, stop: int) -> None:
        part = slice(start // width, stop // width)
        some = matrix[part]
        scale = (some.abs().amax(1, keepdim=True) / most).to(torch.float32)
        parts[".scale"][part] = scale
        # A row of zeros has scale 0, and 0 / 0 would be no number.
        scaled = some.float() / torch.where(scale == 0, 1.0, scale)
        rows[part] = scaled.clamp(-most, most).to(torch.float8_e4m3fn)

    _in_chunks(matrix.numel(), quantize, width)


def _in_chunks(count: int, work: Callable[[int, int], None], unit: int = BLOCK) -> None:
    """Calls ``work(start, stop)`` for parts of ``count`` elements, whole multiples of ``unit``."""
    step = max(_CHUNK_ELEMENTS // unit, 1) * unit
    for start in range(0, count, step):
        work(start, min(start + step, count))
