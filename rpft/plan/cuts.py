"""A partition by where its stages start, and those that are one cut apart from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product

from rpft.plan.plan import Plan, Stage


@dataclass(frozen=True)
class Cuts:
    """A plan by where its stages start."""

    forward: frozenset[int]
    backward: frozenset[int]
    first: int
    """Of the fused stage."""

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
    return tuple(Stage(a, b - 1) for a, b in pairwise([*sorted(start for start in starts if start < end), end]))


def all_cuts(head: int) -> Iterator[Cuts]:
    """Every partition of a model whose head is layer ``head``."""
    for first in range(1, head + 1):
        inner = range(1, first)
        starts = [frozenset({0, *some}) for count in range(first) for some in combinations(inner, count)]
        yield from (Cuts(forward, backward, first) for forward, backward in product(starts, repeat=2))
