"""The best partition: of balanced ones (plan/balance.py) the cuts are moved, and steps are played through.

What is minimised is the predicted time of a step (plan/simulate.py). Which cuts are best depends on all others, by
way of the workers' turns, so no recursion over layers is exact for it. Balanced partitions that the simulator
finds fast are changed at random, a cut or a few at a time, and kept where that makes a step shorter; then cut by
cut, until no change of one, and none of the likeliest changes of two, does. How much is played is counted, not
timed, and random numbers have a seed: the same question has the same answer. Small models have few partitions,
and there all are played.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, islice

import numpy as np

from rpft.plan.balance import balanced_cuts, ramped_cuts
from rpft.plan.costs import LayerCost, layer_loads
from rpft.plan.cuts import Cuts, all_cuts, cuts_of
from rpft.plan.plan import Plan, Stage
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.simulate import rounds_played, steps_seconds
from rpft.plan.step_shape import StepShape

Fits = Callable[[Plan], bool]
Seconds = Callable[[Sequence[Plan]], np.ndarray]
"""Time of a step under each of some plans."""


@dataclass(frozen=True)
class Effort:
    """How hard a plan is searched for."""

    more: float = 1.0
    """How many times as much as usual is played."""
    seed: int = 0
    """Of the changes at random."""


USUAL_EFFORT = Effort()

_AS_GOOD_AS_EQUAL = 1e-6

_MOST_STARTS = 12
"""Plans whose cuts are changed."""

_RAMPS, _RAMPS_AT_ONCE, _SHARE_RAMPS = 3000, 500, 0.3
"""Ramps that are played at most, how many side by side, and the share of what may be played that they may take."""

_GENERATIONS = ((12, 0.5), (4, 1.0))
"""How many plans are changed at random until such a share of that has been played."""

_DRAWN_AT_ONCE = 320
"""Changed plans that are played side by side: fewer take nearly as long."""

_IN_VAIN = 4
"""Times that they are drawn and none is faster, after which there is little to be hoped for."""

_SHARE_DRAWN = 0.8
"""Of what may still be played then, for changes at random."""

_SHARE_BESIDE = 0.7
"""Of what may be played, where a plan is given that is near the best."""

_FEW_BLOCKS = 6
"""Of a model with so few blocks all partitions are played: 5,461 at most."""

_WORTH_A_MOVE = 1e-4

_MOST_TOGETHER = 8
"""Changes that were good alone and are tried together."""

_PAIRED_ENDS = 4
_MOST_PAIRED = 32
"""Changes that were best alone and are tried in pairs where none is good alone."""

_MOST_PLAYED = 5_000_000
"""Slots of all plans that are tried, with those that a plan counts for: half a second to one and a half."""

_PER_PLAN, _PER_SLOT = 400, 2
"""Slots that could be played while a plan is thought of, and while one of its slots is read."""

_REPEATS_WHERE_LATE = 10
"""What a slot counts for where updates are late: some five steps are played to time one, slower than a single."""


class _Search:
    """Looks for a plan like ``like``, in all but its stages, that fits and takes the shortest step.

    ``repeats``: how many slots a slot counts for.
    """

    def __init__(
        self, like: Plan, fits: Fits, seconds: Seconds, repeats: int, effort: Effort = USUAL_EFFORT
    ) -> None:
        self.like, self.fits, self.seconds, self.repeats = like, fits, seconds, repeats
        self.head = like.num_layers - 1
        self.plans: dict[Cuts, Plan] = {}
        self.known: dict[Cuts, float] = {}
        self.fitting: dict[Cuts, bool] = {}
        self.left = effort.more * _MOST_PLAYED
        self.rng = random.Random(effort.seed)

    def plan(self, cuts: Cuts) -> Plan:
        if cuts not in self.plans:
            self.plans[cuts] = cuts.plan(self.like)
        return self.plans[cuts]

    def price(self, plan: Plan) -> int:
        """What playing ``plan`` takes of what may be played."""
        return _PER_PLAN + (_PER_SLOT + self.repeats) * plan.num_slots

    def play(self, some: Iterable[Cuts]) -> None:
        """Finds out how long a step takes under those that are not known yet."""
        new = {cuts: self.plan(cuts) for cuts in some if cuts not in self.known}
        self.left -= sum(map(self.price, new.values()))
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
        """Up to ``count`` that fit: half of them the fastest, then the fastest with each number of slots."""
        seen: Counter[int] = Counter()
        ranked = []
        for cuts in sorted(some, key=lambda cuts: self.known[cuts]):
            if self.fit(cuts):
                slots = self.plan(cuts).num_slots
                ranked.append((seen[slots], cuts))
                seen[slots] += 1
        fastest = [cuts for _, cuts in ranked[: count // 2]]
        return list(dict.fromkeys(fastest + [cuts for _, cuts in sorted(ranked, key=lambda x: x[0])]))[:count]

    def descend(self, starts: Iterable[Cuts], in_pairs: bool) -> list[Cuts]:
        """``starts`` with single cuts changed, or two at a time, for as long as that makes a step shorter."""
        going, ends = list(dict.fromkeys(starts)), []
        while going and self.left > 0:
            tried = {cuts: list(cuts.neighbours(self.head)) for cuts in going}
            if sum(len(others) * self.price(self.plan(cuts)) for cuts, others in tried.items()) > self.left:
                break
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

    def best_from(self, starts: Iterable[Cuts]) -> list[Cuts]:
        """Where changes at random lead from ``starts``, and from the best of that descents, in pairs too."""
        ends = self.evolve(starts, _SHARE_DRAWN * self.left)
        return ends + self.descend(self.fastest(ends, _PAIRED_ENDS), in_pairs=True)

    def play_ramps(self, costs: Sequence[LayerCost]) -> None:
        """Finds out how long a step takes under ramps that fit, with up to about twice the slots of the best."""
        if not self.known:
            return
        most = 2 * self.plan(min(self.known, key=lambda cuts: self.known[cuts])).num_slots
        ramps = ramped_cuts(costs, most, self.rng)
        least = (1 - _SHARE_RAMPS) * self.left
        for _ in range(0, _RAMPS, _RAMPS_AT_ONCE):
            if self.left > least:
                self.play(cuts for cuts in dict.fromkeys(islice(ramps, _RAMPS_AT_ONCE)) if self.fit(cuts))

    def evolve(self, starts: Iterable[Cuts], most: float) -> list[Cuts]:
        """``starts`` with cuts changed at random as long as that makes a step shorter, the best with most tries.

        It ends when ``most`` has been played, or nothing faster is found; the worse ones are left on the way.
        """
        begun, going, ends = self.left, list(dict.fromkeys(starts)), []
        for count, share in _GENERATIONS:
            going.sort(key=lambda cuts: self.known[cuts])
            ends, going, in_vain = ends + going[count:], going[:count], 0
            while going and in_vain < _IN_VAIN and begun - self.left < share * most:
                tries = range(max(1, _DRAWN_AT_ONCE // len(going)))
                drawn = {cuts: [cuts.drawn(self.head, self.rng) for _ in tries] for cuts in going}
                self.play(dict.fromkeys(chain.from_iterable(drawn.values())))
                better = [(*self.fastest(self.shorter(some, cuts), 1), cuts)[0] for cuts, some in drawn.items()]
                in_vain = in_vain + 1 if better == going else 0
                going = list(dict.fromkeys(better))
        return ends + going


def is_small(num_layers: int) -> bool:
    """Whether all partitions of so many layers can be played."""
    return num_layers - 2 <= _FEW_BLOCKS


def _repeats(shape: StepShape) -> int:
    return sum(rounds_played(shape)[0]) * (_REPEATS_WHERE_LATE if shape.delayed else 1)


def balanced_plan(
    costs: Sequence[LayerCost],
    num_workers: int,
    num_microbatches: int,
    rounds: int,
    recompute: str,
    fits: Fits,
    seconds: Seconds | None = None,
    near: Plan | None = None,
    like: Plan | None = None,
    delayed: bool = False,
    effort: Effort = USUAL_EFFORT,
) -> Plan | None:
    """The best plan that ``fits`` accepts, or None. ``costs``: one a layer, embedding to head.

    ``seconds`` says how long a step takes. Without it, where costs are estimates, only compute takes time and the
    best of the balanced plans will do. ``near``: the search starts from it and a few balanced plans, no more.
    ``like``: what the plan is to have beside its stages, if that is more than M and ``recompute``. ``delayed``:
    whether updates are late.
    """
    head = len(costs) - 1
    like = like or Plan((), (Stage(0, head),), num_microbatches, recompute)
    shape = StepShape(layer_loads(costs), 0, 0, num_workers, rounds, delayed=False, slot_seconds=0.0)
    estimated = partial(steps_seconds, shape=shape, rates=AT_ONCE)
    search = _Search(like, fits, seconds or estimated, _repeats(replace(shape, delayed=delayed)), effort)
    if seconds is not None and is_small(len(costs)):
        search.play(all_cuts(head))
        found = search.fastest(search.known, 1)
    else:
        search.play(cuts for cuts in balanced_cuts(costs, thorough=seconds is not None) if search.fit(cuts))
        if seconds is None:
            found = search.fastest(search.known, len(search.known))
        else:
            search.left *= 1 if near is None else _SHARE_BESIDE
            search.play_ramps(costs)
            starts = search.apart(search.known, _MOST_STARTS)
            if near is not None and search.fit(cuts_of(near)):
                search.play([cuts_of(near)])
                starts.append(cuts_of(near))
            found = search.best_from(starts)
    if not found:
        return None
    # Of plans that are as good as equally fast the one with fewer slots moves fewer bytes.
    least = min(search.known[cuts] for cuts in found) * (1 + _AS_GOOD_AS_EQUAL)
    return min((search.plan(cuts) for cuts in found if search.known[cuts] <= least), key=lambda p: p.num_slots)


def improved(plan: Plan, fits: Fits, shape: StepShape, rates: Rates) -> tuple[Plan, float]:
    """``plan``, which fits, with its cuts moved as long as that makes a step shorter; and the step's seconds."""
    search = _Search(plan, fits, partial(steps_seconds, shape=shape, rates=rates), _repeats(shape))
    cuts = cuts_of(plan)
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
