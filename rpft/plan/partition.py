"""The best partition: of balanced ones (plan/balance.py) the cuts are moved, and steps are played through.

What is minimised is the predicted time of a step (plan/simulate.py). Which cuts are best depends on all others, by
way of the workers' turns, so no recursion over layers is exact for it. Balanced partitions that the simulator
finds fast are improved by it, until no change of one cut, and none of the likeliest changes of two, makes a
step shorter. Small models have few partitions, and there all are played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from rpft.plan.balance import balanced_cuts
from rpft.plan.costs import LayerCost, layer_loads
from rpft.plan.cuts import Cuts, all_cuts, cuts_of, stages_of
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

_PAIRED_ENDS = 4
_MOST_PAIRED = 32
"""Changes that were best alone and are tried in pairs where none is good alone."""

_MOST_PLAYED = 330_000
"""Slots in all plans that are tried: a second or two."""


class _Search:
    """Looks for a plan like ``like``, in all but its stages, that fits and takes the shortest step."""

    def __init__(self, like: Plan, fits: Fits, seconds: Seconds, rounds: int) -> None:
        self.like, self.fits, self.seconds = like, fits, seconds
        self.head = like.num_layers - 1
        self.known: dict[Cuts, float] = {}
        self.fitting: dict[Cuts, bool] = {}
        self.left = _MOST_PLAYED // rounds

    def plan(self, cuts: Cuts) -> Plan:
        like = self.like
        return Plan(
            stages_of(cuts.forward, cuts.first),
            (Stage(cuts.first, self.head), *reversed(stages_of(cuts.backward, cuts.first))),
            like.num_microbatches,
            like.recompute,
            like.keep_bytes_per_token,
            like.resident,
            like.dispatch,
        )

    def play(self, some: Iterable[Cuts]) -> None:
        """Finds out how long a step takes under those that are not known yet."""
        new = {cuts: self.plan(cuts) for cuts in some if cuts not in self.known}
        self.left -= sum(plan.num_slots for plan in new.values())
        self.known.update(zip(new, self.seconds(list(new.values())).tolist(), strict=True))

    def fit(self, cuts: Cuts) -> bool:
        if cuts not in self.fitting:
            self.fitting[cuts] = self.fits(self.plan(cuts))
        return self.fitting[cuts]

    def fastest(self, some: Iterable[Cuts], count: int) -> list[Cuts]:
        """The first ``count`` of those that fit."""
        found: list[Cuts] = []
        for cuts in sorted(some, key=lambda cuts: self.known[cuts]):
            if len(found) == count:
                break
            if self.fit(cuts):
                found.append(cuts)
        return found

    def apart(self, some: Iterable[Cuts], count: int) -> list[Cuts]:
        """Up to ``count`` that fit, first the best with their backward stages or number of slots."""
        seen: Counter[object] = Counter()
        ranked = []
        for cuts in sorted(some, key=lambda cuts: self.known[cuts]):
            if self.fit(cuts):
                kinds = (cuts.backward, cuts.first), self.plan(cuts).num_slots
                ranked.append((min(seen[kind] for kind in kinds), cuts))
                seen.update(kinds)
        return [cuts for _, cuts in sorted(ranked, key=lambda item: item[0])[:count]]

    def descend(self, starts: Iterable[Cuts], in_pairs: bool) -> list[Cuts]:
        """``starts`` with single cuts changed, or two at a time, for as long as that makes a step shorter."""
        going, ends = list(dict.fromkeys(starts)), []
        while going and self.left > 0:
            tried = {cuts: list(cuts.neighbours(self.head)) for cuts in going}
            self.play(other for others in tried.values() for other in others)
            better, changed = {}, {}
            for cuts, others in tried.items():
                better[cuts] = self.fastest(self.shorter(others, cuts), _MOST_TOGETHER)
                several: list[Sequence[Cuts]] = [better[cuts][:n] for n in range(2, len(better[cuts]) + 1)]
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

    def shorter(self, some: Iterable[Cuts], cuts: Cuts) -> list[Cuts]:
        """Those whose step is shorter than that of ``cuts`` by more than nothing."""
        least = self.known[cuts] * (1 - _WORTH_A_MOVE)
        return [other for other in some if self.known[other] < least]

    def descend_from(self, starts: Iterable[Cuts]) -> list[Cuts]:
        """Where the descents from ``starts`` end, changes in pairs tried where most is to be hoped for."""
        ends = self.descend(starts, in_pairs=False)
        return self.descend(self.fastest(ends, _PAIRED_ENDS), in_pairs=True)

    def affordable(self, cuts: Cuts) -> int:
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
        search.play(all_cuts(head))
        found = search.fastest(search.known, 1)
    else:
        search.play(cuts for cuts in balanced_cuts(costs, thorough=seconds is not None) if search.fit(cuts))
        found = search.fastest(search.known, len(search.known) if seconds is None else 1)
        if seconds is not None and near is not None:
            starts = search.apart(search.known, _STARTS_BESIDE)
            if search.fit(cuts_of(near)):
                search.play([cuts_of(near)])
                starts.append(cuts_of(near))
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
    search, cuts = _Search(plan, fits, seconds, rounds), cuts_of(plan)
    search.play([cuts])
    cuts = search.descend_from([cuts])[0]
    return search.plan(cuts), search.known[cuts]


def with_smaller_fused_stage(plan: Plan, fits: Fits) -> Plan | None:
    """``plan``, or the plan most like it with a smaller fused stage that ``fits``; None where none does.

    The layers that leave the fused stage join the stages below or, where those grow too big, become their own.
    """
    search, cuts = _Search(plan, fits, lambda plans: np.zeros(len(plans)), 1), cuts_of(plan)
    for first in range(cuts.first, search.head + 1):
        joined = replace(cuts, first=first)
        apart = replace(joined, forward=cuts.forward | {cuts.first}, backward=cuts.backward | {cuts.first})
        for changed in (joined, apart):
            if search.fit(changed):
                return search.plan(changed)
    return None
