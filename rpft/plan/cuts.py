"""A partition by where its stages start, and those that are one cut apart from it."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product, starmap

from rpft.plan.plan import Plan, Stage

_AT_ONCE = (1, 1, 1, 1, 2, 2, 3, 5)
"""How many cuts are changed at random at once."""

_OF_THE_FUSED_STAGE, _MOVES = 0.1, (-3, -2, -1, -1, 1, 1, 2, 3)
"""The share of such changes that are of the fused stage, and by how many layers its start is moved."""

_OF_STARTS_THERE_ARE, _MOVED_BY = 0.75, (-2, -1, -1, 1, 1, 2)
"""The share of the others that move or leave out a start, and by how many layers starts are moved."""


@dataclass(frozen=True)
class Cuts:
    """A plan by where its stages start."""

    forward: frozenset[int]
    backward: frozenset[int]
    first: int
    """Of the fused stage."""

    def plan(self, like: Plan) -> Plan:
        """``like`` in all but its stages."""
        return Plan(
            stages_of(self.forward, self.first),
            (Stage(self.first, like.fused.last), *reversed(stages_of(self.backward, self.first))),
            like.num_microbatches,
            like.recompute,
            like.keep_bytes_per_token,
            like.resident,
            like.dispatch,
        )

    def changed(self, others: Iterable[Cuts], base: Cuts) -> Cuts:
        """These cuts with what each of ``others`` has other than ``base``."""
        forward, backward, first = self.forward, self.backward, self.first
        for other in others:
            forward ^= other.forward ^ base.forward
            backward ^= other.backward ^ base.backward
            first += other.first - base.first
        return Cuts(forward, backward, first)

    def neighbours(self, head: int) -> Iterator[Cuts]:
        """All that differ in one cut: moved by a layer, left out, or added."""
        for first in (self.first - 1, self.first + 1):
            if 0 < first <= head:
                yield Cuts(self.forward, self.backward, first)
        for starts in _one_cut_apart(self.forward, self.first):
            yield Cuts(starts, self.backward, self.first)
        for starts in _one_cut_apart(self.backward, self.first):
            yield Cuts(self.forward, starts, self.first)

    def drawn(self, head: int, rng: random.Random) -> Cuts:
        """These cuts with one or a few moved, left out or added at random."""
        forward, backward, first = self.forward, self.backward, self.first
        for _ in range(_drawn(_AT_ONCE, rng)):
            which = rng.random()
            if which < _OF_THE_FUSED_STAGE:
                moved = first + _drawn(_MOVES, rng)
                first = moved if 0 < moved <= head else first
            elif which < (1 + _OF_THE_FUSED_STAGE) / 2:
                forward = _one_drawn(forward, first, rng)
            else:
                backward = _one_drawn(backward, first, rng)
        return Cuts(forward, backward, first)


def _drawn(values: Sequence[int], rng: random.Random) -> int:
    """One of ``values``; several times as fast as ``rng.choice``."""
    return values[int(rng.random() * len(values))]


def _one_drawn(starts: frozenset[int], end: int, rng: random.Random) -> frozenset[int]:
    """One start below ``end`` left out or added, or one or several in a row moved by a layer or two."""
    if end < 2:
        return starts
    within = sorted(starts)
    within = within[bisect_right(within, 0) : bisect_left(within, end)]
    if not within or rng.random() >= _OF_STARTS_THERE_ARE:
        return starts ^ {1 + int(rng.random() * (end - 1))}
    low = high = int(rng.random() * len(within))
    if rng.random() < 0.5:
        low, high = sorted((low, int(rng.random() * len(within))))
    moved, by = within[low : high + 1], _drawn(_MOVED_BY, rng)
    bounds = [0, *within, end]
    if bounds[low] < moved[0] + by and moved[-1] + by < bounds[high + 2]:
        return (starts - set(moved)) | {start + by for start in moved}
    return starts ^ {within[low]}


def _one_cut_apart(starts: frozenset[int], end: int) -> Iterator[frozenset[int]]:
    for start in range(1, end):
        yield starts ^ {start}
        if start in starts:
            yield from (starts ^ {start, moved} for moved in (start - 1, start + 1) if _free(moved, starts, end))


def _free(start: int, starts: frozenset[int], end: int) -> bool:
    return 0 < start < end and start not in starts


def cuts_of(plan: Plan) -> Cuts:
    """Those of a plan."""
    return Cuts(
        frozenset(stage.first for stage in plan.forward),
        frozenset(stage.first for stage in plan.backward[1:]),
        plan.fused.first,
    )


@lru_cache(maxsize=8192)
def stages_of(starts: frozenset[int], end: int) -> tuple[Stage, ...]:
    """The stages over the layers below ``end``, from the bottom."""
    within = sorted(starts)
    within[bisect_left(within, end) :] = [end]
    return tuple(starmap(_stage, pairwise(within)))


@lru_cache(maxsize=16384)
def _stage(first: int, end: int) -> Stage:
    return Stage(first, end - 1)


def all_cuts(head: int) -> Iterator[Cuts]:
    """Every partition of a model whose head is layer ``head``."""
    for first in range(1, head + 1):
        inner = range(1, first)
        starts = [frozenset({0, *some}) for count in range(first) for some in combinations(inner, count)]
        yield from (Cuts(forward, backward, first) for forward, backward in product(starts, repeat=2))
