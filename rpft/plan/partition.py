"""A balanced plan: forward and backward stages of about equal time, the split with the shortest makespan.

Simple on purpose: it tries every bottleneck that whole numbers of blocks give, and a stage a layer, and packs
layers greedily below it. It knows compute only, from the shapes of the weights; a planner on measured times takes
its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from rpft.plan.costs import LayerCost
from rpft.plan.plan import Plan, Stage

_FORWARD_SHARES = (1.0, 0.5, 0.25)
"""Smaller forward stages start sooner after an exact update."""

_AS_GOOD_AS_EQUAL = 1e-6

_STARTS = 8
"""Balanced plans whose cuts are moved."""

_WORTH_A_MOVE = 1e-4
_MOST_TRIALS = 3000
_MOST_EVENTS = 1_500_000
"""Plans looked at, and microbatches of stages in all of them: a few seconds."""


def makespan(slot_times: Sequence[float], num_workers: int, num_microbatches: int, rounds: int) -> float:
    """Time until the last slot of ``rounds`` ends, slots given round-robin to workers; transfers take no time.

    ``slot_times``: time of one microbatch of each slot of a round. Microbatch j of a slot starts when microbatch
    j of the slot before is done and the worker is free. For equal times this is the closed form of the RoundPipe
    schedule (arXiv 2604.27085): (floor((RS - 1) / N) M + (RS - 1) mod N + M) t for M >= N.
    """
    free = [0.0] * num_workers
    done = [0.0] * num_microbatches
    for number in range(rounds * len(slot_times)):
        worker, time = number % num_workers, slot_times[number % len(slot_times)]
        for m in range(num_microbatches):
            if number % len(slot_times) == 0:
                done[m] = 0.0  # a new round waits for no hidden state of the last one
            free[worker] = done[m] = max(free[worker], done[m]) + time
    return max(free)


def balanced_plan(
    costs: Sequence[LayerCost],
    num_workers: int,
    num_microbatches: int,
    rounds: int,
    recompute: str,
    fits: Callable[[Plan], bool],
    seconds: Callable[[Plan], float] | None = None,
) -> Plan | None:
    """The best of the balanced plans that ``fits`` accepts, or None. ``costs``: one a layer, embedding to head.

    ``seconds`` says how long a step takes; without it transfers and the optimizer take no time.
    """
    blocks = [cost.with_recompute for cost in costs[1:-1]]
    candidates: dict[Plan, float] = {}
    bottlenecks = {0.0}  # a stage a layer
    for count in range(1, len(blocks) + 1):
        bottlenecks |= {max(_sums(blocks, count)), max(*_sums(blocks, count), _head(costs))}
    for bottleneck in sorted(bottlenecks):
        for share in (1.0,) if seconds is None else _FORWARD_SHARES:
            plan = _pack(costs, bottleneck, num_microbatches, recompute, share)
            if plan in candidates or not fits(plan):
                continue
            if seconds is None:
                times = slot_times(plan, costs)
                candidates[plan] = makespan(times, num_workers, num_microbatches, rounds)
            else:
                candidates[plan] = seconds(plan)
    if not candidates:
        return None
    # Of plans that are as good as equally fast the one with fewer slots moves fewer bytes.
    close = min(candidates.values()) * (1 + _AS_GOOD_AS_EQUAL)
    if seconds is None:
        return min((plan for plan in candidates if candidates[plan] <= close), key=lambda plan: plan.num_slots)
    for plan in sorted(candidates, key=lambda plan: candidates[plan])[:_STARTS]:
        improved(plan, candidates, fits, seconds, rounds)
    return min(candidates, key=lambda plan: candidates[plan])


def improved(
    plan: Plan,
    known: dict[Plan, float],
    fits: Callable[[Plan], bool],
    seconds: Callable[[Plan], float],
    rounds: int,
) -> Plan:
    """``plan`` with its cuts moved, one at a time, for as long as that makes a step of ``rounds`` shorter.

    ``known`` has the seconds of plans that were looked at, ``plan`` among them, and gets those of more.
    """
    most = min(_MOST_TRIALS, _MOST_EVENTS // (2 * plan.num_layers * plan.num_microbatches * rounds))
    while len(known) < most:
        tried = list(_neighbours(plan))
        for other in tried:
            if other not in known:
                known[other] = seconds(other) if fits(other) else math.inf
        best = min(tried, key=lambda other: known[other])
        if known[best] >= known[plan] * (1 - _WORTH_A_MOVE):
            break
        plan = best
    return plan


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Plans that differ from ``plan`` in one cut: moved by a layer, left out, or added."""
    head, first = plan.num_layers - 1, plan.fused.first
    forward = [stage.first for stage in plan.forward]
    backward = [stage.first for stage in reversed(plan.backward[1:])]

    def build(forward: Sequence[int], backward: Sequence[int], first: int) -> Plan:
        def stages(starts: Sequence[int]) -> list[Stage]:
            kept = sorted(start for start in starts if start < first)
            return [Stage(a, b - 1) for a, b in pairwise([*kept, first])]

        fused = Stage(first, head)
        parts = tuple(stages(forward)), (fused, *reversed(stages(backward)))
        return Plan(*parts, plan.num_microbatches, plan.recompute, plan.keep_bytes_per_token)

    for fused_first in (first - 1, first + 1):
        if 0 < fused_first <= head:
            yield build(forward, backward, fused_first)
    for starts, rebuild in (
        (forward, lambda cuts: build(cuts, backward, first)),
        (backward, lambda cuts: build(forward, cuts, first)),
    ):
        for start in starts[1:]:
            others = set(starts) - {start}
            yield rebuild(sorted(others))
            for moved in (start - 1, start + 1):
                if 0 < moved < first and moved not in others:
                    yield rebuild(sorted(others | {moved}))
        for start in range(1, first):
            if start not in starts:
                yield rebuild(sorted({*starts, start}))


def slot_times(plan: Plan, costs: Sequence[LayerCost]) -> list[float]:
    """Time of one microbatch of each slot of a round, in the unit of ``costs``."""
    forward = [sum(costs[i].forward for i in stage.layers) for stage in plan.forward]
    backward = [sum(costs[i].with_recompute for i in stage.layers) for stage in plan.backward]
    return forward + backward


def _sums(values: Sequence[float], count: int) -> list[float]:
    return [sum(values[i : i + count]) for i in range(0, len(values), count)]


def _head(costs: Sequence[LayerCost]) -> float:
    return costs[-1].with_recompute


def _pack(
    costs: Sequence[LayerCost], bottleneck: float, num_microbatches: int, recompute: str, forward_share: float
) -> Plan:
    """Stages of consecutive layers, each at most ``bottleneck`` unless a single layer is more.

    ``forward_share``: of the bottleneck, what forward stages may take.
    """
    limit = bottleneck * (1 + 1e-9)
    head = len(costs) - 1
    first = head
    total = costs[head].with_recompute
    # The embedding is left to the forward stages: fused, it would make the model one stage.
    while first > 1 and total + costs[first - 1].with_recompute <= limit:
        first -= 1
        total += costs[first].with_recompute
    backward = [Stage(first, head)]
    top = first - 1
    while top >= 0:
        low, total = top, costs[top].with_recompute
        while low > 0 and total + costs[low - 1].with_recompute <= limit:
            low -= 1
            total += costs[low].with_recompute
        backward.append(Stage(low, top))
        top = low - 1
    # Recompute by stage keeps the inputs of backward stages: forward stages that start there add no hidden state.
    starts = [stage.first for stage in reversed(backward[1:])] if recompute == "stage" else range(first)
    forward: list[Stage] = []
    for low, end in pairwise([*starts, first]):
        piece = sum(cost.forward for cost in costs[low:end])
        if forward and total + piece <= limit * forward_share:
            forward[-1] = Stage(forward[-1].first, end - 1)
            total += piece
        else:
            forward.append(Stage(low, end - 1))
            total = piece
    return Plan(tuple(forward), tuple(backward), num_microbatches, recompute)


def choose_num_microbatches(accumulation: int, most: int = 16) -> int:
    """M for a step of ``accumulation`` microbatches: its largest divisor up to ``most``.

    More microbatches a round move weights less often and keep more hidden states in RAM. The number of workers
    has no say, and the numbers do not depend on the choice.
    """
    return max(m for m in range(1, min(most, accumulation) + 1) if accumulation % m == 0)
