"""A balanced plan: forward and backward stages of about equal time, the split with the shortest makespan.

Simple on purpose: it tries every bottleneck that whole numbers of blocks give, and a stage a layer, and packs
layers greedily below it. It knows compute only, from the shapes of the weights; a planner on measured times takes
its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpft.plan.costs import LayerCost
from rpft.plan.plan import Plan, Stage


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
) -> Plan | None:
    """The best of the balanced plans that ``fits`` accepts, or None. ``costs``: one a layer, embedding to head."""
    blocks = [cost.with_recompute for cost in costs[1:-1]]
    candidates: dict[Plan, float] = {}
    bottlenecks = {0.0}  # a stage a layer
    for count in range(1, len(blocks) + 1):
        bottlenecks |= {max(_sums(blocks, count)), max(*_sums(blocks, count), _head(costs))}
    for bottleneck in sorted(bottlenecks):
        plan = _pack(costs, bottleneck, num_microbatches, recompute)
        if plan not in candidates and fits(plan):
            times = slot_times(plan, costs)
            candidates[plan] = makespan(times, num_workers, num_microbatches, rounds)
    if not candidates:
        return None
    # Of equally fast plans the one with fewer slots moves fewer bytes.
    return min(candidates, key=lambda plan: (round(candidates[plan], 6), plan.num_slots))


def slot_times(plan: Plan, costs: Sequence[LayerCost]) -> list[float]:
    """Time of one microbatch of each slot of a round, in the unit of ``costs``."""
    forward = [sum(costs[i].forward for i in stage.layers) for stage in plan.forward]
    backward = [sum(costs[i].with_recompute for i in stage.layers) for stage in plan.backward]
    return forward + backward


def _sums(values: Sequence[float], count: int) -> list[float]:
    return [sum(values[i : i + count]) for i in range(0, len(values), count)]


def _head(costs: Sequence[LayerCost]) -> float:
    return costs[-1].with_recompute


def _pack(costs: Sequence[LayerCost], bottleneck: float, num_microbatches: int, recompute: str) -> Plan:
    """Stages of consecutive layers, each at most ``bottleneck`` unless a single layer is more."""
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
    forward = []
    low = 0
    while low < first:
        high, total = low, costs[low].forward
        while high + 1 < first and total + costs[high + 1].forward <= limit:
            high += 1
            total += costs[high].forward
        forward.append(Stage(low, high))
        low = high + 1
    return Plan(tuple(forward), tuple(backward), num_microbatches, recompute)


def choose_num_microbatches(accumulation: int, most: int = 16) -> int:
    """M for a step of ``accumulation`` microbatches: its largest divisor up to ``most``.

    More microbatches a round move weights less often and keep more hidden states in RAM. The number of workers
    has no say, and the numbers do not depend on the choice.
    """
    return max(m for m in range(1, min(most, accumulation) + 1) if accumulation % m == 0)
