"""What a tensor of a stack of experts has of some of them: its place in the whole, cut out of it and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def mark_of(experts: range) -> str:
    """What the names of tensors have at the end that are of ``experts`` alone."""
    return f"[{experts.start}:{experts.stop}]"


@dataclass(frozen=True)
class ExpertSlice:
    """What is of ``experts`` in a tensor that has as much of each of ``of``.

    Its elements lie as [of, ...], or, with ``last``, as [..., of]: the first dimension, or the last, goes over all
    experts and, for a factor of an adapter, over its rank.
    """

    experts: range
    of: int
    last: bool

    @property
    def mark(self) -> str:
        return mark_of(self.experts)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of the slice, ``whole`` being that of the tensor."""
        return self._scaled(whole, self.of, len(self.experts))

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor, ``own`` being that of the slice."""
        return self._scaled(own, len(self.experts), self.of)

    def resized(self, whole: Sequence[int], size_of: Callable[[int], int]) -> tuple[int, ...]:
        """As ``shape``, with other sizes for what is not of one expert or another."""
        *others, axis = whole if self.last else reversed(whole)
        sizes = [*map(size_of, others), axis // self.of * len(self.experts)]
        return tuple(sizes if self.last else reversed(sizes))

    def cut_out(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of ``whole``; a view where its elements lie together."""
        return self._within(whole.reshape(self._flat(self.of))).reshape(self.shape(whole.shape))

    def put_into(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Writes the slice into ``whole``, whose elements must lie in one piece."""
        self._within(whole.view(self._flat(self.of))).copy_(own.reshape(self._flat(len(self.experts))))

    def _within(self, flat: torch.Tensor) -> torch.Tensor:
        part = slice(self.experts.start, self.experts.stop)
        return flat[:, part] if self.last else flat[part]

    def _flat(self, count: int) -> tuple[int, int]:
        return (-1, count) if self.last else (count, -1)

    def _scaled(self, shape: Sequence[int], before: int, after: int) -> tuple[int, ...]:
        if self.last:
            return (*shape[:-1], shape[-1] // before * after)
        return (shape[0] // before * after, *shape[1:])


def slice_of(name: str, experts: range, of: int) -> ExpertSlice:
    """What the tensor ``name`` of a stack of ``of`` experts, or of its adapters, has of ``experts``.

    All have their experts first but peft's second factor, [out, rank x experts]. That two halves make what the
    whole makes is tried before a stack is cut: see model/cut_experts.py.
    """
    return ExpertSlice(experts, of, last="lora_B" in name.split("."))
