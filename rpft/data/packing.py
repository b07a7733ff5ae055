"""Put rows together: into packs of one line, and lines into microbatches of even cost."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

_EVEN_AT_TOKENS = 16_384
"""Length at which attention costs as much as all that is linear in it; exact only for one size of model."""


def pack_lengths(lengths: Sequence[int] | np.ndarray, max_seq_len: int) -> list[tuple[int, ...]]:
    """First-fit decreasing over rows of ``lengths`` tokens: groups of their indices.

    Rows from the longest to the shortest (ties by index), each into the first pack with room for it.
    Deterministic. All rows of one length are placed at once, for they fill the packs in their order.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert sizes.max(initial=0) <= max_seq_len, "a row is longer than a pack"
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    smallest = int(distinct[0]) if len(distinct) else 0
    pack_of = np.empty(len(sizes), dtype=np.int64)
    # Packs that some row may still fit into: their numbers, ascending, and their room.
    open_packs, room = np.empty(0, np.int64), np.empty(0, np.int64)
    num_packs, placed = 0, 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        fits = room // size
        before = np.cumsum(fits) - fits
        taken = np.clip(count - before, 0, fits)
        rest = count - int(taken.sum())
        a_pack = max_seq_len // size
        new = -(-rest // a_pack)
        new_taken = np.full(new, a_pack, dtype=np.int64)
        if new:
            new_taken[-1] = rest - a_pack * (new - 1)
        open_packs = np.concatenate([open_packs, np.arange(num_packs, num_packs + new)])
        room = np.concatenate([room - taken * size, max_seq_len - new_taken * size])
        pack_of[placed : placed + count] = np.repeat(open_packs, np.concatenate([taken, new_taken]))
        num_packs, placed = num_packs + new, placed + count
        has_room = room >= smallest
        open_packs, room = open_packs[has_room], room[has_room]
    by_pack = np.argsort(pack_of, kind="stable")
    members = order[by_pack].tolist()
    bounds = [0, *np.cumsum(np.bincount(pack_of, minlength=num_packs)).tolist()]
    return [tuple(members[start:end]) for start, end in itertools.pairwise(bounds)]


def packing_efficiency(lengths: Sequence[int] | np.ndarray, num_packs: int, max_seq_len: int) -> float:
    """Share of the places of all packs that rows take: 1 at best."""
    return float(np.sum(lengths, dtype=np.int64)) / (num_packs * max_seq_len) if num_packs else 1.0


def choose_microbatches(
    lengths: Sequence[int],
    rows_per_microbatch: int,
    pad_lengths: Sequence[int],
    same_rows: bool,
) -> list[list[int]]:
    """Put the lines of a step into microbatches: groups of indices into ``lengths``, costliest first.

    There are as many microbatches as ``rows_per_microbatch`` lines each would make. Lines of like length share
    one, so that little is padded (to the smallest of ``pad_lengths``, ascending, that holds them); the number of
    lines differs, so that the costs, which grow with length and length squared, are even: of all such
    groupings the one with the smallest largest cost. None holds more padded tokens than ``rows_per_microbatch``
    of the longest lines of the run. With ``same_rows``, for where every shape costs a compilation, each has
    ``rows_per_microbatch`` lines, and the last may have fewer. A single line a microbatch keeps the order of
    ``lengths``.
    """
    count = len(lengths)
    if rows_per_microbatch == 1:
        return [[index] for index in range(count)]
    order = sorted(range(count), key=lambda index: (-lengths[index], index))
    if same_rows:
        return [order[first : first + rows_per_microbatch] for first in range(0, count, rows_per_microbatch)]
    wanted = -(-count // rows_per_microbatch)
    widths = [pad_lengths[bisect.bisect_left(pad_lengths, lengths[index])] for index in order]
    line_costs = [width * (1 + width / _EVEN_AT_TOKENS) for width in widths]
    most_tokens = rows_per_microbatch * pad_lengths[-1]

    def cut(limit: float) -> list[int]:
        """Where groups start when each takes lines up to a cost."""
        starts = [0]
        while True:
            first = starts[-1]
            rows = max(1, min(int(limit / line_costs[first]), most_tokens // widths[first]))
            if first + rows >= count:
                return starts
            starts.append(first + rows)

    # A cost is one of rows x that of a line; the smallest that needs no more than the wanted groups is found by
    # halving the range of all of them.
    costs = np.unique(np.outer(np.arange(1, count + 1), np.unique(line_costs)))
    low, high = 0, len(costs) - 1
    while low < high:
        middle = (low + high) // 2
        # A little more than the cost itself, against the rounding of the division.
        low, high = (low, middle) if len(cut(costs[middle] * (1 + 1e-9))) <= wanted else (middle + 1, high)
    starts = cut(costs[low] * (1 + 1e-9))
    groups = [order[first:end] for first, end in zip(starts, [*starts[1:], count], strict=True)]
    cost_of = dict(zip(order, line_costs, strict=True))
    while len(groups) < wanted:
        # Fewer were enough; more, smaller ones cost no more.
        split = max((g for g in groups if len(g) > 1), key=lambda g: len(g) * cost_of[g[0]])
        place = groups.index(split)
        groups[place : place + 1] = [split[: len(split) // 2], split[len(split) // 2 :]]
    return sorted(groups, key=lambda group: -len(group) * cost_of[group[0]])
