"""The best partition: dynamic programming gives balanced stages, and playing steps through moves their cuts.

What is minimised is the predicted time of a step (plan/simulate.py). Which cuts are best depends on all others, by
way of the workers' turns, so no recursion over layers is exact for it. Tables over numbers of stages, layers below
and the last cut, O(L^3), give the partitions whose longest stage is shortest. Those of them that the simulator
finds fast are then improved by it, until no change of one cut, and none of the likeliest changes of two, makes a
step shorter. Small models have few partitions, and there all are played.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise, product

import numpy as np

from rpft.plan.costs import LayerCost, layer_loads
from rpft.plan.plan import Plan, Stage
from rpft.plan.rates import AT_ONCE
from rpft.plan.simulate import steps_seconds
from rpft.plan.step_shape import StepShape

Fits = Callable[[Plan], bool]
Seconds = Callable[[Sequence[Plan]], np.ndarray]
"""Time of a step under each of some plans."""

_AS_GOOD_AS_EQUAL = 1e-6

_MOST_STARTS = 32
"""Balanced plans whose cuts are moved."""

_STARTS_BESIDE = 8
"""Balanced plans whose cuts are moved where a plan is given that is near the best."""

_CHANGES = 5
"""That a start should be able to go through."""

_FEW_BLOCKS = 6
"""Of a model with so few blocks all partitions are played: 5,461 at most."""

_WORTH_A_MOVE = 1e-4

_MOST_TOGETHER = 8
"""Changes that were good alone and are tried together."""

_TAPERED = 0.4
"""Share of the backward, its end, for which stages half as long are tried too: the workers then end together."""

_COUNTS = 12
"""Numbers of forward stages, and of backward stages, that are tried in all combinations."""

_PAIRED_ENDS = 4
_MOST_PAIRED = 32
"""Changes that were best alone and are tried in pairs where none is good alone."""

_MOST_PLAYED = 330_000
"""Slots in all plans that are tried: a second or two."""


@dataclass(frozen=True)
class _Cuts:
    """A plan by where its stages start."""

    forward: frozenset[int]
    backward: frozenset[int]
    first: int
    """Of the fused stage."""

    def changed(self, others: Iterable[_Cuts], base: _Cuts) -> _Cuts:
        """These cuts with what each of ``others`` has other than ``base``."""
        forward, backward, first = self.forward, self.backward, self.first
        for other in others:
            forward ^= other.forward ^ base.forward
            backward ^= other.backward ^ base.backward
            first += other.first - base.first
        return _Cuts(forward, backward, first)

    def neighbours(self, head: int) -> Iterator[_Cuts]:
        """All that differ in one cut: moved by a layer, left out, or added."""
        for first in (self.first - 1, self.first + 1):
            if 0 < first <= head:
                yield _Cuts(self.forward, self.backward, first)
        for starts in _one_cut_apart(self.forward, self.first):
            yield _Cuts(starts, self.backward, self.first)
        for starts in _one_cut_apart(self.backward, self.first):
            yield _Cuts(self.forward, starts, self.first)


def _one_cut_apart(starts: frozenset[int], end: int) -> Iterator[frozenset[int]]:
    for start in range(1, end):
        yield starts ^ {start}
        if start in starts:
            yield from (starts ^ {start, moved} for moved in (start - 1, start + 1) if _free(moved, starts, end))


def _free(start: int, starts: frozenset[int], end: int) -> bool:
    return 0 < start < end and start not in starts


def _cuts_of(plan: Plan) -> _Cuts:
    return _Cuts(
        frozenset(stage.first for stage in plan.forward),
        frozenset(stage.first for stage in plan.backward[1:]),
        plan.fused.first,
    )


@lru_cache(maxsize=8192)
def _stages(starts: frozenset[int], end: int) -> tuple[Stage, ...]:
    """The stages over the layers below ``end``, from the bottom."""
    return tuple(Stage(a, b - 1) for a, b in pairwise([*sorted(start for start in starts if start < end), end]))


class _Search:
    """Looks for a plan like ``like``, in all but its stages, that fits and takes the shortest step."""

    def __init__(self, like: Plan, fits: Fits, seconds: Seconds, rounds: int) -> None:
        self.like, self.fits, self.seconds = like, fits, seconds
        self.head = like.num_layers - 1
        self.known: dict[_Cuts, float] = {}
        self.fitting: dict[_Cuts, bool] = {}
        self.left = _MOST_PLAYED // rounds

    def plan(self, cuts: _Cuts) -> Plan:
        like = self.like
        return Plan(
            _stages(cuts.forward, cuts.first),
            (Stage(cuts.first, self.head), *reversed(_stages(cuts.backward, cuts.first))),
            like.num_microbatches,
            like.recompute,
            like.keep_bytes_per_token,
            like.resident,
            like.dispatch,
        )

    def play(self, some: Iterable[_Cuts]) -> None:
        """Finds out how long a step takes under those that are not known yet."""
        new = {cuts: self.plan(cuts) for cuts in some if cuts not in self.known}
        self.left -= sum(plan.num_slots for plan in new.values())
        self.known.update(zip(new, self.seconds(list(new.values())).tolist(), strict=True))

    def fit(self, cuts: _Cuts) -> bool:
        if cuts not in self.fitting:
            self.fitting[cuts] = self.fits(self.plan(cuts))
        return self.fitting[cuts]

    def fastest(self, some: Iterable[_Cuts], count: int) -> list[_Cuts]:
        """The first ``count`` of those that fit."""
        found: list[_Cuts] = []
        for cuts in sorted(some, key=lambda cuts: self.known[cuts]):
            if len(found) == count:
                break
            if self.fit(cuts):
                found.append(cuts)
        return found

    def apart(self, some: Iterable[_Cuts], count: int) -> list[_Cuts]:
        """Up to ``count`` that fit, first the best with their backward stages or number of slots."""
        seen: Counter[object] = Counter()
        ranked = []
        for cuts in sorted(some, key=lambda cuts: self.known[cuts]):
            if self.fit(cuts):
                kinds = (cuts.backward, cuts.first), self.plan(cuts).num_slots
                ranked.append((min(seen[kind] for kind in kinds), cuts))
                seen.update(kinds)
        return [cuts for _, cuts in sorted(ranked, key=lambda item: item[0])[:count]]

    def descend(self, starts: Iterable[_Cuts], in_pairs: bool) -> list[_Cuts]:
        """``starts`` with single cuts changed, or two at a time, for as long as that makes a step shorter."""
        going, ends = list(dict.fromkeys(starts)), []
        while going and self.left > 0:
            tried = {cuts: list(cuts.neighbours(self.head)) for cuts in going}
            self.play(other for others in tried.values() for other in others)
            better, changed = {}, {}
            for cuts, others in tried.items():
                better[cuts] = self.fastest(self.shorter(others, cuts), _MOST_TOGETHER)
                several: list[Sequence[_Cuts]] = [better[cuts][:n] for n in range(2, len(better[cuts]) + 1)]
                if in_pairs and not better[cuts]:
                    others.sort(key=lambda other: self.known[other])
                    several += combinations(others[:_MOST_PAIRED], 2)
                joined = [cuts.changed(some, cuts) for some in several]
                changed[cuts] = [other for other in joined if 0 < other.first <= self.head]
            self.play(other for others in changed.values() for other in others)
            best = {cuts: self.fastest([*better[cuts], *self.shorter(changed[cuts], cuts)], 1) for cuts in going}
            ends += [cuts for cuts in going if not best[cuts]]
            going = list(dict.fromkeys(best[cuts][0] for cuts in going if best[cuts]))
        return ends + going

    def shorter(self, some: Iterable[_Cuts], cuts: _Cuts) -> list[_Cuts]:
        """Those whose step is shorter than that of ``cuts`` by more than nothing."""
        least = self.known[cuts] * (1 - _WORTH_A_MOVE)
        return [other for other in some if self.known[other] < least]

    def descend_from(self, starts: Iterable[_Cuts]) -> list[_Cuts]:
        """Where the descents from ``starts`` end, changes in pairs tried where most is to be hoped for."""
        ends = self.descend(starts, in_pairs=False)
        return self.descend(self.fastest(ends, _PAIRED_ENDS), in_pairs=True)

    def affordable(self, cuts: _Cuts) -> int:
        """From how many starts like ``cuts`` a descent of some changes can be paid."""
        one = len(list(cuts.neighbours(self.head))) * self.plan(cuts).num_slots
        return max(2, min(_MOST_STARTS, self.left // (_CHANGES * one)))


def is_small(num_layers: int) -> bool:
    """Whether all partitions of so many layers can be played."""
    return num_layers - 2 <= _FEW_BLOCKS


def balanced_plan(
    costs: Sequence[LayerCost],
    num_workers: int,
    num_microbatches: int,
    rounds: int,
    recompute: str,
    fits: Fits,
    seconds: Seconds | None = None,
    near: Plan | None = None,
) -> Plan | None:
    """The best plan that ``fits`` accepts, or None. ``costs``: one a layer, embedding to head.

    ``seconds`` says how long a step takes. Without it, where costs are estimates, only compute takes time and the
    best of the balanced plans will do. ``near``: the search starts from it and a few balanced plans, no more.
    """
    head = len(costs) - 1
    like = Plan((), (Stage(0, head),), num_microbatches, recompute)
    shape = StepShape(layer_loads(costs), 0, 0, num_workers, rounds, delayed=False, slot_seconds=0.0)
    search = _Search(like, fits, seconds or (lambda plans: steps_seconds(plans, shape, AT_ONCE)), rounds)
    if seconds is not None and is_small(len(costs)):
        search.play(_all(head))
        found = search.fastest(search.known, 1)
    else:
        search.play(cuts for cuts in _balanced(costs, thorough=seconds is not None) if search.fit(cuts))
        found = search.fastest(search.known, len(search.known) if seconds is None else 1)
        if seconds is not None and near is not None:
            starts = search.apart(search.known, _STARTS_BESIDE)
            if search.fit(_cuts_of(near)):
                search.play([_cuts_of(near)])
                starts.append(_cuts_of(near))
            found = search.descend_from(starts)
        elif found and seconds is not None:
            found = search.descend_from(search.apart(search.known, search.affordable(found[0])))
    if not found:
        return None
    # Of plans that are as good as equally fast the one with fewer slots moves fewer bytes.
    least = min(search.known[cuts] for cuts in found) * (1 + _AS_GOOD_AS_EQUAL)
    return min((search.plan(cuts) for cuts in found if search.known[cuts] <= least), key=lambda p: p.num_slots)


def improved(plan: Plan, fits: Fits, seconds: Seconds, rounds: int) -> tuple[Plan, float]:
    """``plan``, which fits, with its cuts moved as long as that makes a step shorter; and the step's seconds."""
    search, cuts = _Search(plan, fits, seconds, rounds), _cuts_of(plan)
    search.play([cuts])
    cuts = search.descend_from([cuts])[0]
    return search.plan(cuts), search.known[cuts]


def with_smaller_fused_stage(plan: Plan, fits: Fits) -> Plan | None:
    """``plan``, or the plan most like it with a smaller fused stage that ``fits``; None where none does.

    The layers that leave the fused stage join the stages below or, where those grow too big, become their own.
    """
    search, cuts = _Search(plan, fits, lambda plans: np.zeros(len(plans)), 1), _cuts_of(plan)
    for first in range(cuts.first, search.head + 1):
        joined = replace(cuts, first=first)
        apart = replace(joined, forward=cuts.forward | {cuts.first}, backward=cuts.backward | {cuts.first})
        for changed in (joined, apart):
            if search.fit(changed):
                return search.plan(changed)
    return None


class _Table:
    """For 1, 2, ... stages and any number of layers from the bottom, the best partition."""

    def __init__(self, values: np.ndarray, even: bool = False) -> None:
        """Best is where the longest stage is shortest, or if ``even`` where the sum of squares is least."""
        up_to = np.concatenate(([0.0], np.cumsum(values)))
        # (where the last stage starts, where it ends)
        stage = np.where(np.tri(len(up_to), k=-1, dtype=bool).T, up_to[None, :] - up_to[:, None], math.inf)
        stage = stage**2 if even else stage
        join = np.add if even else np.maximum
        self.best, self.last_cuts = [stage[0]], [np.zeros(len(up_to), int)]
        for _ in range(len(values) - 1):
            joined = join(self.best[-1][:, None], stage)
            # Of equals the first, so that shorter stages are below; sums differ in their last digits.
            cut = np.argmax(joined <= joined.min(axis=0) * (1 + 1e-9), axis=0)
            self.best.append(np.take_along_axis(joined, cut[None], axis=0)[0])
            self.last_cuts.append(cut)

    def starts(self, count: int, layers: int) -> frozenset[int]:
        """Where ``count`` stages over ``layers`` layers start."""
        found = []
        for cuts in reversed(self.last_cuts[:count]):
            layers = int(cuts[layers])
            found.append(layers)
        return frozenset(found)

    def fewest(self, layers: int, limit: float) -> int:
        """How many stages over ``layers`` layers it takes for none to be above ``limit``; at most one a layer."""
        return next((i + 1 for i in range(layers) if self.best[i][layers] <= limit), layers)

    def counts(self, layers: int, most: int) -> list[int]:
        """About ``most`` of the numbers of stages over ``layers`` layers that make the longest one shorter."""
        useful = [1]
        for count in range(2, layers + 1):
            if self.best[count - 1][layers] < self.best[useful[-1] - 1][layers] * (1 - 1e-9):
                useful.append(count)
        step = max(1, len(useful) // most)
        return sorted({*useful[::step], useful[-1], layers})


def even_stages(values: Sequence[float], counts: Iterable[int]) -> list[tuple[Stage, ...]]:
    """For each of ``counts`` so many stages over layers that cost ``values``: the longest as short as can be, and
    all as even as can be.
    """
    tables, layers = [_Table(np.array(values), even) for even in (False, True)], len(values)
    return [_stages(table.starts(count, layers), layers) for count in counts for table in tables]


def _balanced(costs: Sequence[LayerCost], thorough: bool) -> Iterator[_Cuts]:
    """Partitions whose longest stage is shortest, for many numbers of backward stages.

    Forward stages are as long as backward ones, or if ``thorough`` also of many other numbers; then there are
    backward stages that are even, and some that are shorter at the end, too.
    """
    head = len(costs) - 1
    ahead = np.array([cost.forward for cost in costs[:head]])
    forward, even_forward = _Table(ahead), _Table(ahead, even=True)
    values = np.array([cost.with_recompute for cost in costs[:head]])
    low = np.cumsum(values) <= _TAPERED * values.sum()
    for scaled in (values, values * (1 + low)) if thorough else (values,):
        table = _Table(scaled)
        kinds = (table, _Table(scaled, even=True)) if thorough else (table,)
        for count in table.counts(head, _COUNTS):
            limit = float(table.best[count - 1][head]) * (1 + 1e-9)
            first, fused = head, costs[head].with_recompute
            # The embedding is left to the forward stages: fused, it would make the model one stage.
            while first > 1 and fused + costs[first - 1].with_recompute <= limit:
                first -= 1
                fused += costs[first].with_recompute
            for top in {first, head}:
                number = table.fewest(top, limit)
                forward_counts = forward.counts(top, _COUNTS) if thorough else [forward.fewest(top, limit)]
                for starts in {kind.starts(number, top) for kind in kinds}:
                    yield from (_Cuts(even_forward.starts(n, top), starts, top) for n in forward_counts)


def _all(head: int) -> Iterator[_Cuts]:
    """Every partition of a model whose head is layer ``head``."""
    for first in range(1, head + 1):
        inner = range(1, first)
        starts = [frozenset({0, *some}) for count in range(first) for some in combinations(inner, count)]
        yield from (_Cuts(forward, backward, first) for forward, backward in product(starts, repeat=2))


def choose_num_microbatches(accumulation: int, most: int = 16) -> int:
    """M for a step of ``accumulation`` microbatches where no time is known: its largest divisor up to ``most``.

    More microbatches a round move weights less often and keep more hidden states in RAM.
    """
    return next(m for m in divisors(accumulation) if m <= most)


def divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]
