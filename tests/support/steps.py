"""Steps to plan for, and the rules of the schedule in their plainest form, to hold the simulator against."""

import random

from rpft.plan.costs import LayerCost, LayerLoad
from rpft.plan.plan import Plan
from rpft.plan.rates import Rates
from rpft.plan.step_shape import StepShape


def makespan(slot_times: list[float], num_workers: int, num_microbatches: int, rounds: int) -> float:
    """Time until the last slot ends: the rules of the schedule once more, slowly, one microbatch at a time."""
    free = [0.0] * num_workers
    done = [0.0] * num_microbatches
    for number in range(rounds * len(slot_times)):
        worker, time = number % num_workers, slot_times[number % len(slot_times)]
        for m in range(num_microbatches):
            if number % len(slot_times) == 0:
                done[m] = 0.0  # a new round waits for no hidden state of the last one
            free[worker] = done[m] = max(free[worker], done[m]) + time
    return max(free)


def slot_times(plan: Plan, costs: list[LayerCost]) -> list[float]:
    """Time of one microbatch of each slot of a round."""
    forward = [sum(costs[i].forward for i in stage.layers) for stage in plan.forward]
    backward = [sum(costs[i].with_recompute for i in stage.layers) for stage in plan.backward]
    return forward + backward


def random_step(rng: random.Random, blocks: int) -> tuple[list[LayerCost], StepShape, Rates, int]:
    """(costs, shape, rates, M) of a run with uneven layers, and mostly with transfers and updates that show."""
    uneven, weight = rng.random() < 0.5, rng.choice([0, 300_000, 1_000_000])
    seconds = [0.01, *(rng.uniform(0.5, 3.0) if uneven else 1.0 for _ in range(blocks)), rng.uniform(1, 12)]
    loads = [LayerLoad(x, 3 * x, weight_bytes=weight, gradient_bytes=weight, num_trained=weight) for x in seconds]
    workers, rounds = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2])
    shape = StepShape(loads, 1000, weight // 100, workers, rounds, rng.random() < 0.5, slot_seconds=1e-3)
    up, down, update = rng.uniform(0.1, 4), rng.uniform(0.1, 4), rng.uniform(0.05, 2)
    rates = Rates(1e6 / up, 1e6 / down, 1e6 / update)
    return [LayerCost(x, 2 * x) for x in seconds], shape, rates, rng.choice([2, 3, 4, 8])
