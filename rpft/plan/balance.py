"""Partitions to start a search from: the longest stage as short as can be, for many numbers of stages; and ramps.

Tables over numbers of stages, layers below and the last cut give the balanced ones, O(L^3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rpft.plan.costs import LayerCost
from rpft.plan.cuts import Cuts, stages_of
from rpft.plan.plan import Stage

_TAPERED = 0.4
"""Share of the backward, its end, for which stages half as long are tried too: the workers then end together."""

_COUNTS = 12
"""Numbers of forward stages, and of backward stages, that are tried in all combinations."""

_STEEPEST_FORWARD, _STEEPEST_BACKWARD = 3.0, 2.0
"""Power of a stage's number with which the work below it grows, at most."""


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
    return [stages_of(table.starts(count, layers), layers) for count in counts for table in tables]


def balanced_cuts(costs: Sequence[LayerCost], thorough: bool) -> Iterator[Cuts]:
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
                    yield from (Cuts(even_forward.starts(n, top), starts, top) for n in forward_counts)


def ramped_cuts(costs: Sequence[LayerCost], most: int, rng: random.Random) -> Iterator[Cuts]:
    """Partitions without end, drawn at random, whose stages are the shorter the lower their layers.

    So workers begin a step, and end it, sooner after one another. How many stages there are, up to ``most``, and
    how steep the ramp is, is drawn for forward and backward each.
    """
    head = len(costs) - 1
    forward = _up_to([cost.forward for cost in costs[:head]])
    backward = _up_to([cost.with_recompute for cost in costs])

    def ramp(up_to: np.ndarray, steepest: float) -> frozenset[int]:
        count = int(min(head, most) ** rng.random()) + 1
        work = (np.arange(count) / count) ** (1 + (steepest - 1) * rng.random()) * up_to[-1]
        return frozenset(np.searchsorted(up_to, work).tolist())

    while True:
        starts = ramp(backward, _STEEPEST_BACKWARD)
        first = min(max(starts), head)
        if first > 0:
            yield Cuts(ramp(forward[: first + 1], _STEEPEST_FORWARD), starts, first)


def _up_to(values: Sequence[float]) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... of ``values``."""
    return np.concatenate(([0.0], np.cumsum(values)))
