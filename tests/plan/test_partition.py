"""Partitions: the balanced plan, the best plan, and the makespan that the first is chosen by."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from support.engines import random_plan
from support.partitions import every_plan
from support.steps import makespan, random_step, slot_times

from rpft.plan.balance import ramped_cuts
from rpft.plan.cases import read_cases
from rpft.plan.costs import LayerCost, LayerLoad
from rpft.plan.partition import Effort, balanced_plan, improved, with_smaller_fused_stage
from rpft.plan.plan import Plan, Stage
from rpft.plan.pool import serve
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.rounds import choose_num_microbatches
from rpft.plan.simulate import step_seconds, steps_seconds
from rpft.plan.step_shape import StepShape

# (workers, slots a round, rounds, microbatches) -> makespan, for slots of time 1: values of the closed form in the
# RoundPipe paper (arXiv 2604.27085). It needs M >= N; where M is less the value is an independent event model's.
EVEN = [
    ((4, 6, 2, 4), 15),
    ((4, 7, 3, 4), 24),
    ((8, 15, 2, 8), 37),
    ((4, 6, 2, 5), 18),
    ((4, 8, 2, 5), 23),
    ((4, 8, 2, 6), 27),
    ((4, 7, 2, 6), 25),
    ((4, 6, 2, 3), 13),
    ((1, 5, 2, 3), 30),
    ((2, 3, 1, 2), 4),
    ((4, 3, 1, 4), 6),
    ((4, 2, 1, 4), 5),
    ((4, 2, 5, 4), 13),
]


@pytest.mark.parametrize(("case", "expected"), EVEN)
def test_makespan_of_equal_slots_is_the_published_one(case, expected):
    workers, slots, rounds, m = case
    assert makespan([1.0] * slots, workers, m, rounds) == expected


def test_makespan_of_equal_slots_is_the_closed_form_for_m_and_slots_of_at_least_n():
    for workers in range(1, 6):
        for slots in range(workers, 9):
            for rounds in range(1, 4):
                for m in range(workers, workers + 4):
                    last = rounds * slots - 1
                    closed = last // workers * m + last % workers + m
                    assert makespan([2.0] * slots, workers, m, rounds) == 2.0 * closed


def test_makespan_of_uneven_slots_on_one_worker_is_their_sum():
    assert makespan([1.0, 3.0, 0.5], 1, 4, 2) == 4 * 2 * 4.5


def test_rounds_overlap_where_workers_are_left_over():
    assert makespan([1.0, 1.0], 4, 4, 2) == makespan([1.0, 1.0], 4, 4, 1) == 5


def test_makespan_waits_for_the_hidden_state_of_a_slower_slot():
    # Slot 0 takes 3 a microbatch on worker 0; slot 1 takes 1 and follows each microbatch on worker 1.
    assert makespan([3.0, 1.0], 2, 2, 1) == 7.0


def uniform(blocks, head=1.0):
    return [LayerCost(0.01, 0.02), *[LayerCost(1.0, 2.0)] * blocks, LayerCost(head, 2 * head)]


def uneven(blocks, seed):
    rng = random.Random(seed)
    return [
        LayerCost(x, 2 * x) for x in (0.001, *(rng.uniform(0.5, 3.0) for _ in range(blocks)), rng.uniform(1, 20))
    ]


def span(plan, costs, workers, m, rounds):
    return makespan(slot_times(plan, costs), workers, m, rounds)


SOME_DEPTHS = [*range(1, 9), 12, 17, 24, 40]


@pytest.mark.parametrize(
    "depths", [SOME_DEPTHS, pytest.param(range(1, 41), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_the_balanced_plan_is_legal_for_any_depth_and_no_slower_than_one_block_a_stage(workers, recompute, depths):
    for blocks in depths:
        for costs in (uniform(blocks), uniform(blocks, head=18.0), uneven(blocks, seed=blocks)):
            m = workers + 2
            plan = balanced_plan(costs, workers, m, 2, recompute, lambda plan: True)
            assert plan is not None
            plan.check(blocks + 2)
            assert (plan.num_microbatches, plan.recompute) == (m, recompute)
            head = blocks + 1
            fine = Plan(
                tuple(Stage(i, i) for i in range(head)),
                (Stage(head, head), *(Stage(i, i) for i in reversed(range(head)))),
                m,
                recompute,
            )
            assert span(plan, costs, workers, m, 2) <= span(fine, costs, workers, m, 2) * (1 + 1e-9), blocks


def test_the_balanced_plan_keeps_near_the_work_divided_by_the_workers():
    costs = uniform(36, head=7.0)
    plan = balanced_plan(costs, 4, 8, 3, "stage", lambda plan: True)
    assert plan is not None
    times = slot_times(plan, costs)
    assert span(plan, costs, 4, 8, 3) < 1.15 * sum(times) * 8 * 3 / 4


def test_slot_times_count_the_recompute_in_backward_stages_and_none_in_forward():
    plan = Plan((Stage(0, 1),), (Stage(2, 3), Stage(0, 1)), 1, "stage")
    costs = [LayerCost(1.0, 2.0), LayerCost(10.0, 20.0), LayerCost(100.0, 200.0), LayerCost(1000.0, 2000.0)]
    assert slot_times(plan, costs) == [11.0, 3300.0, 33.0]


def longest(plan):
    return max(len(stage.layers) for stage in plan.forward + plan.backward)


def test_only_plans_that_fit_are_taken():
    asked = []

    def fits(plan):
        asked.append(plan)
        return longest(plan) <= 3

    plan = balanced_plan(uniform(12), 2, 4, 1, "stage", fits)
    assert plan in asked
    assert plan is not None
    assert longest(plan) <= 3
    free = balanced_plan(uniform(12), 1, 4, 1, "stage", lambda plan: True)
    assert free is not None
    assert longest(free) > 3


def test_there_is_no_plan_where_none_fits():
    assert balanced_plan(uniform(12), 2, 4, 1, "stage", lambda plan: False) is None


@pytest.mark.parametrize(
    ("accumulation", "m"), [(1, 1), (2, 2), (12, 12), (16, 16), (17, 1), (24, 12), (32, 16), (34, 2)]
)
def test_m_is_the_largest_divisor_up_to_sixteen(accumulation, m):
    assert choose_num_microbatches(accumulation) == m
    assert math.gcd(accumulation, m) == m


def test_a_step_of_compute_alone_takes_the_makespan_and_counts_the_recompute_in_backward_stages_only():
    plan = Plan((Stage(0, 1),), (Stage(2, 3), Stage(0, 1)), 1, "stage")
    costs = [LayerCost(1.0, 2.0), LayerCost(10.0, 20.0), LayerCost(100.0, 200.0), LayerCost(1000.0, 2000.0)]
    loads = [LayerLoad(cost.forward, cost.with_recompute) for cost in costs]
    shape = StepShape(loads, 0, 0, 1, 1, False, slot_seconds=0.0)
    assert step_seconds(plan, shape, AT_ONCE) == sum(slot_times(plan, costs)) == 3344.0


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 6])
def test_the_plan_of_a_model_of_up_to_eight_layers_is_the_best_there_is(blocks):
    for seed in range(6 if blocks < 6 else 2):
        rng = random.Random(seed)
        costs, shape, rates, m = random_step(rng, blocks)
        seconds = partial(steps_seconds, shape=shape, rates=rates)
        recompute = rng.choice(["stage", "layer"])
        least = seconds(list(every_plan(blocks + 2, m, recompute))).min()
        plan = balanced_plan(costs, shape.num_workers, m, shape.rounds, recompute, lambda plan: True, seconds)
        assert plan is not None
        assert step_seconds(plan, shape, rates) == pytest.approx(least)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [6, 7])
def test_the_search_for_larger_models_finds_the_best_plan_too(blocks, monkeypatch):
    monkeypatch.setattr("rpft.plan.partition._FEW_BLOCKS", 0)
    for seed in range(20):
        rng = random.Random(seed)
        costs, shape, rates, m = random_step(rng, blocks)
        seconds = partial(steps_seconds, shape=shape, rates=rates)
        least = seconds(list(every_plan(blocks + 2, m, "stage"))).min()
        plan = balanced_plan(costs, shape.num_workers, m, shape.rounds, "stage", lambda plan: True, seconds)
        assert plan is not None
        assert step_seconds(plan, shape, rates) == pytest.approx(least, rel=2e-4), seed


CASES = read_cases(Path(__file__).with_name("published.json"))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_good_as_the_published_splits(name, delayed):
    case = CASES[name]
    shape = case.shape(delayed)
    costs = [LayerCost(load.forward, load.backward + load.recompute - load.forward) for load in shape.loads]
    seconds = partial(steps_seconds, shape=shape, rates=AT_ONCE)
    limits = max(case.forward), max(1, *case.backward)

    def fits(plan):  # stages of no more decoder layers than the published ones have, which had to fit a card
        return all(
            sum(0 < layer <= case.layers for layer in stage.layers) <= limit
            for stages, limit in zip((plan.forward, plan.backward), limits, strict=True)
            for stage in stages
        )

    plan = balanced_plan(costs, 8, case.round, shape.rounds, "stage", fits, seconds, delayed=delayed)
    assert plan is not None
    plan.check(case.layers + 2)
    assert fits(plan)
    assert step_seconds(plan, shape, AT_ONCE) <= step_seconds(case.plan, shape, AT_ONCE) * (1 + 1e-9)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_plan_of_128_blocks_takes_no_more_playing_than_agreed(rounds, delayed):
    block = LayerLoad(0.02, 0.06, weight_bytes=10**9, gradient_bytes=10**9, num_trained=5 * 10**8)
    loads = [LayerLoad(0.001, 0.002), *[block] * 128, LayerLoad(0.05, 0.15)]
    costs = [LayerCost(load.forward, load.backward - load.forward) for load in loads]
    shape = StepShape(loads, 8192, 10**8, 4, rounds, delayed)
    played = 0

    def seconds(plans):
        nonlocal played
        played += sum(400 + rounds * plan.num_slots * (10 if delayed else 1) for plan in plans)
        return steps_seconds(plans, shape, Rates(25e9, 25e9, 4e9))

    plan = balanced_plan(
        costs, 4, 8, rounds, "layer", lambda plan: len(plan.fused.layers) <= 4, seconds, delayed=delayed
    )
    assert plan is not None
    plan.check(130)
    assert played < 5_500_000  # 1.8 s of one core at most


def test_the_same_search_finds_the_same_plan_whatever_the_machine_does():
    costs, shape, rates, m = random_step(random.Random(3), 14)
    seconds = partial(steps_seconds, shape=shape, rates=rates)
    found = {
        balanced_plan(costs, shape.num_workers, m, shape.rounds, "stage", lambda plan: True, seconds)
        for _ in range(2)
    }
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_is_searched_for_from_one_that_is_near_takes_no_longer_than_that_one(seed):
    """Whatever the search misses."""
    rng = random.Random(seed)
    costs, shape, rates, m = random_step(rng, 9)
    seconds = partial(steps_seconds, shape=shape, rates=rates)
    near = replace(random_plan(rng, len(costs), m), recompute="layer")
    found = balanced_plan(
        costs,
        shape.num_workers,
        m,
        shape.rounds,
        "layer",
        lambda plan: True,
        seconds,
        near=near,
        delayed=shape.delayed,
        effort=Effort(more=0.02),  # little is tried
    )
    assert found is not None
    assert step_seconds(found, shape, rates) <= step_seconds(near, shape, rates) * (1 + 1e-5)


def test_partitions_drawn_at_random_are_legal_and_ramps_grow_from_the_bottom():
    rng, head = random.Random(0), 21
    costs = uniform(head - 1, head=4.0)
    like = Plan((), (Stage(0, head),), 4, "stage")
    for cuts in islice(ramped_cuts(costs, 30, rng), 200):
        plan = cuts.plan(like)
        plan.check(head + 1)
        forward = [sum(costs[layer].forward for layer in stage.layers) for stage in plan.forward]
        assert all(low <= high + 1.5 for low, high in pairwise(forward[:-1]))  # up to a layer's roundings
        for _ in range(20):
            cuts = cuts.drawn(head, rng)
            cuts.plan(like).check(head + 1)


def test_a_plan_is_improved_within_what_fits():
    costs = uniform(12, head=5.0)
    loads = [LayerLoad(cost.forward, cost.with_recompute) for cost in costs]
    shape = StepShape(loads, 0, 0, 3, 1, False, slot_seconds=0.0)
    start = Plan((Stage(0, 12),), (Stage(13, 13), Stage(0, 12)), 4, "layer", 8, (3,))
    plan, took = improved(start, lambda plan: plan.num_slots <= 9, shape, AT_ONCE)
    plan.check(14)
    assert replace(plan, forward=start.forward, backward=start.backward) == start
    assert plan.num_slots <= 9
    assert took == step_seconds(plan, shape, AT_ONCE) < 0.8 * step_seconds(start, shape, AT_ONCE)


def test_a_plan_that_does_not_fit_gets_a_smaller_fused_stage_first():
    plan = Plan((Stage(0, 3), Stage(4, 5)), (Stage(6, 9), Stage(3, 5), Stage(0, 2)), 4, "layer", 8)
    assert with_smaller_fused_stage(plan, lambda plan: True) == plan

    joined = with_smaller_fused_stage(plan, lambda plan: len(plan.fused.layers) <= 2)
    assert joined == replace(
        plan, forward=(Stage(0, 3), Stage(4, 7)), backward=(Stage(8, 9), Stage(3, 7), Stage(0, 2))
    )
    apart = with_smaller_fused_stage(plan, lambda plan: max(len(stage.layers) for stage in plan.backward) <= 3)
    assert apart == replace(
        plan,
        forward=(Stage(0, 3), Stage(4, 5), Stage(6, 6)),
        backward=(Stage(7, 9), Stage(6, 6), Stage(3, 5), Stage(0, 2)),
    )
    assert with_smaller_fused_stage(plan, lambda plan: False) is None


def test_a_server_that_is_told_of_some_jobs_is_done_with_them_as_one_that_is_told_of_all():
    rng = np.random.default_rng(0)
    arrivals = np.sort(rng.random((9, 300)), axis=0).cumsum(axis=0)  # in ever longer intervals
    free, before, each = rng.random((3, 300)) * [[5.0], [1.0], [1.0]]
    expected, done = [], free
    for arrival in arrivals:
        done = np.maximum(done + before, arrival) + each
        expected.append(done)
    numbers = np.arange(9)[:, None]
    assert np.allclose(serve(arrivals, free, before, each, numbers), expected)
    ends = [0, 8]
    assert np.allclose(serve(arrivals[ends], free, before, each, numbers[ends]), np.array(expected)[ends])
