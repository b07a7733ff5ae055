"""What a forward pass keeps for its backward, as one flat buffer of bytes that crosses the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rpft.model.layout import ALIGNMENT_BYTES, align


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of known shape, strides and dtype at its place in the buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


class FromForward(NamedTuple):
    """What the forward of a block has kept for its backward, as it was brought to where the backward runs."""

    budget_bytes: int
    """As ``Block.forward_keeping`` was given it."""
    buffer: torch.Tensor
    """uint8."""


class KeptLayout:
    """Places of the tensors that one block keeps for one microbatch; ``num_bytes`` of all."""

    def __init__(self, examples: Sequence[torch.Tensor]) -> None:
        """``examples`` have the shapes, strides and dtypes; each is dense, in whatever order of dimensions."""
        self._tensors: list[KeptTensor] = []
        offset = 0
        for example in examples:
            size = example.numel() * example.dtype.itemsize
            place = KeptTensor(tuple(example.shape), tuple(example.stride()), example.dtype, offset, size)
            self._tensors.append(place)
            offset = align(offset + size, ALIGNMENT_BYTES)
        self.num_bytes = offset

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """(byte offset, content as it lies in memory) of each tensor, to be copied into the buffer."""
        result = []
        for place, tensor in zip(self._tensors, tensors, strict=True):
            if tensor.stride() != place.stride:  # a kernel may lay out its result in a way of its own
                laid_out = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=tensor.device)
                tensor = laid_out.copy_(tensor)
            result.append((place.offset, _bytes_of(tensor)))
        return result

    def tensors_in(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of ``buffer``, uint8."""
        views: list[Any] = []
        for place in self._tensors:
            flat = buffer[place.offset : place.offset + place.num_bytes].view(place.dtype)
            views.append(flat.as_strided(place.shape, place.stride))
        return views


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The content of a dense tensor in the order of its memory, uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
