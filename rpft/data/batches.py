"""Choose the rows of each step and lay them out as microbatches of tensors."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rpft.data.dataset import Dataset
from rpft.data.rows import Row

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Rows that go through the model together, padded on the right.

    input_ids: int64 [rows, seq]. labels: int64 [rows, seq], already shifted: ``labels[b, t]`` is the token
    that the logits at position t must predict, or IGNORE_INDEX. position_ids: int64 [rows, seq], or None when
    no row is a pack, which means 0..seq-1 in every row. trained_tokens counts the labels, tokens the real
    tokens (padding excluded).

    There is no attention mask. Attention is causal, so no real token looks at padding to its right, and
    padding has no label, so what it computes reaches neither loss nor gradient. In packs, positions that
    restart at 0 tell one row from the next.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    trained_tokens: int
    tokens: int


class BatchOrder:
    """Which items (rows or packs) each step takes: a pure function of seed and step.

    Every epoch is a fresh permutation of the items. The epochs follow one another in one stream, which is cut
    into steps of ``items_per_step``: nothing is left out between epochs, and only the last step may be
    short. ``num_epochs`` may be a fraction. ``max_steps`` (None: no limit) wins over it, and draws further
    epochs when it asks for more steps than they give.
    """

    def __init__(
        self, num_items: int, items_per_step: int, seed: int, num_epochs: float, max_steps: int | None
    ) -> None:
        assert num_items > 0
        assert items_per_step > 0
        self._num_items = num_items
        self._items_per_step = items_per_step
        self._seed = seed
        # The rounding takes off the error of a product like 3 * 0.1 before the ceiling sees it.
        self._total = max(1, math.ceil(round(num_items * num_epochs, 6)))
        if max_steps is not None:
            if max_steps > self.num_steps:
                self._total = max_steps * items_per_step
            self._total = min(self._total, max_steps * items_per_step)

    @property
    def num_steps(self) -> int:
        return math.ceil(self._total / self._items_per_step)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that it takes until every item was seen once."""
        return math.ceil(self._num_items / self._items_per_step)

    def items(self, step: int) -> list[int]:
        """The items of a step, counted from 0."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        first = step * self._items_per_step
        places = range(first, min(first + self._items_per_step, self._total))
        return [int(self._permutation(place // self._num_items)[place % self._num_items]) for place in places]

    def epoch(self, step: int) -> float:
        """Epochs that are done when step ``step`` (counted from 0) is done."""
        return min((step + 1) * self._items_per_step, self._total) / self._num_items

    def _permutation(self, epoch: int) -> np.ndarray:
        return _permutation(self._num_items, self._seed, epoch)


@functools.lru_cache(maxsize=4)
def _permutation(num_items: int, seed: int, epoch: int) -> np.ndarray:
    # Raw Philox words, sorted: unlike Generator.permutation, whose stream may change with numpy's version,
    # this gives the same order to a run that is resumed years later.
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_items)
    return np.argsort(words, kind="stable")


def make_microbatches(
    dataset: Dataset,
    groups: Sequence[tuple[int, ...]],
    micro_batch_size: int,
    pad_id: int,
    pad_lengths: Sequence[int],
) -> list[Microbatch]:
    """Lay out the items of one step, in their order, ``micro_batch_size`` to a microbatch.

    The last microbatch may hold fewer lines. See ``lay_out``.
    """
    chosen = [groups[first : first + micro_batch_size] for first in range(0, len(groups), micro_batch_size)]
    return lay_out(dataset, chosen, pad_id, pad_lengths)


def lay_out(
    dataset: Dataset, microbatches: Sequence[Sequence[tuple[int, ...]]], pad_id: int, pad_lengths: Sequence[int]
) -> list[Microbatch]:
    """The microbatches of one step as tensors; each is a list of groups.

    Each group holds the indices of the rows that share one line of ``input_ids``. The lines of a microbatch
    are padded to the smallest of ``pad_lengths`` (ascending) that holds the longest of them. When any group is a
    pack, every microbatch of the step has position_ids.
    """
    packed = any(len(group) > 1 for groups in microbatches for group in groups)
    return [
        _microbatch([[dataset.rows[index] for index in group] for group in groups], packed, pad_id, pad_lengths)
        for groups in microbatches
    ]


def _microbatch(lines: list[list[Row]], packed: bool, pad_id: int, pad_lengths: Sequence[int]) -> Microbatch:
    lengths = [sum(len(row.ids) for row in line) for line in lines]
    width = pad_lengths[bisect.bisect_left(pad_lengths, max(lengths))]
    input_ids = np.full((len(lines), width), pad_id, dtype=np.int64)
    labels = np.full((len(lines), width), IGNORE_INDEX, dtype=np.int64)
    position_ids = np.zeros((len(lines), width), dtype=np.int64)
    for b, line in enumerate(lines):
        start = 0
        for row in line:
            end = start + len(row.ids)
            input_ids[b, start:end] = row.ids
            # The shift stays inside the row: its last token has no label, so none crosses into the next row.
            labels[b, start : end - 1] = np.where(row.trained[1:], row.ids[1:], IGNORE_INDEX)
            position_ids[b, start:end] = np.arange(len(row.ids))
            start = end
        position_ids[b, start:] = np.arange(width - start)
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids) if packed else None,
        trained_tokens=int((labels != IGNORE_INDEX).sum()),
        tokens=sum(lengths),
    )
