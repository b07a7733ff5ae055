"""The few lengths to which lines are padded where every new shape of a microbatch costs time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def choose_pad_lengths(lengths: Sequence[int] | np.ndarray, multiple: int, most: int) -> list[int]:
    """At most ``most`` multiples of ``multiple``, ascending, that pad lines of ``lengths`` tokens the least.

    A line is padded to the smallest of them that holds it; the last is that of the longest line. A function of
    its arguments alone. Dynamic programming over the n distinct rounded lengths, O(most n^2): of the lines up to
    one of them, those below some cut are padded best with one length fewer, and those above it alike.
    """
    rounded = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    sizes, counts = np.unique(rounded, return_counts=True)
    lines = np.concatenate([[0], np.cumsum(counts)])
    # fewest[j]: padded tokens of the lines of the first j sizes, which one length more serves each time around.
    fewest = np.concatenate([[0], sizes * lines[1:]])
    cuts: list[list[int]] = []
    for _ in range(1, min(most, len(sizes))):
        below = [0]
        better = fewest.copy()
        for j in range(1, len(sizes) + 1):
            totals = fewest[:j] + sizes[j - 1] * (lines[j] - lines[:j])
            below.append(int(np.argmin(totals)))
            better[j] = totals[below[-1]]
        cuts.append(below)
        fewest = better
    chosen, j = [len(sizes)], len(sizes)
    for below in reversed(cuts):
        j = below[j]
        chosen.append(j)
    return [int(sizes[j - 1]) for j in reversed(chosen) if j > 0]
