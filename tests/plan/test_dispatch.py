"""Workers that differ: slots in turn against slots where they are done first, and the better one is planned."""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from support.steps import random_step

from rpft.plan.costs import LayerCost, LayerLoad
from rpft.plan.dispatch import dispatched
from rpft.plan.partition import balanced_plan
from rpft.plan.plan import Plan, Stage
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.schedules import StageTime, round_pipe
from rpft.plan.simulate import step_seconds, steps_seconds
from rpft.plan.step_shape import StepShape

SPEEDS = [[1.0, 0.5], [1.0, 1.0, 0.4], [1.0, 0.25, 0.25]]


def fine(blocks, m):
    """A plan with a block a stage, as a small card asks for."""
    head = blocks + 1
    stages = tuple(Stage(i, i) for i in range(head))
    return Plan(stages, (Stage(head, head), *reversed(stages)), m, "layer")


def shape_of(blocks, speeds, delayed=False, rounds=1, weight=10**8):
    moved = {"weight_bytes": weight, "gradient_bytes": weight, "num_trained": weight // 2}
    loads = [LayerLoad(x * 1e-2, x * 3e-2, **moved) for x in (0.1, *[1] * blocks, 5)]
    return StepShape(loads, 1000, 10**6, len(speeds), rounds, delayed, speeds=speeds)


RATES = Rates(25e9, 25e9, 2e9)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_small_stages_are_not_left_to_the_slowest_card(speeds, delayed):
    plan, shape = fine(12, 8), shape_of(12, speeds, delayed)
    better, seconds = dispatched(plan, shape, RATES)
    assert seconds < 0.93 * step_seconds(plan, shape, RATES)
    assert seconds == pytest.approx(step_seconds(better, shape, RATES))
    assert (better.forward, better.backward, len(better.dispatch)) == (plan.forward, plan.backward, plan.num_slots)


def test_no_step_is_shorter_than_its_work_spread_over_the_cards_by_their_speeds():
    for delayed, speeds in product((False, True), SPEEDS):
        plan, shape = fine(8, 8), replace(shape_of(8, speeds, delayed), slot_seconds=0.0)
        _, seconds = dispatched(plan, shape, AT_ONCE)
        work = sum(load.forward for load in shape.loads[:-1]) + sum(load.backward for load in shape.loads)
        assert seconds >= plan.num_microbatches * work / sum(speeds) * (1 - 1e-9)


def test_the_order_is_close_to_the_best_of_all_orders():
    behind = []
    for seed in range(8):
        rng = random.Random(seed)
        _, shape, rates, m = random_step(rng, 2)
        shape = replace(shape, num_workers=2, rounds=1, speeds=[1.0, rng.choice([0.3, 0.5, 0.8])])
        plan = fine(2, m)
        every = [replace(plan, dispatch=order) for order in product(range(2), repeat=plan.num_slots)]
        least = min(step_seconds(plan, shape, rates), steps_seconds(every, shape, rates).min())
        _, seconds = dispatched(plan, shape, rates)
        behind.append(seconds / least)
    assert min(behind) >= 1 - 1e-9
    assert sorted(behind)[5] < 1.001  # of eight
    assert max(behind) < 1.03


def test_turns_stay_where_nothing_is_saved():
    plan, shape = fine(6, 8), shape_of(6, [1.0, 1.0])
    assert not shape.mixed
    same, seconds = dispatched(replace(plan, dispatch=(1, 0)), shape_of(6, [1.0, 1.0 - 1e-9]), RATES)
    assert seconds <= step_seconds(plan, shape, RATES) * (1 + 1e-6)
    assert same.dispatch == () or seconds < 0.996 * step_seconds(plan, shape, RATES)


def test_an_order_in_turn_that_is_written_out_takes_what_turns_take():
    plan, shape = fine(5, 4), shape_of(5, [1.0, 0.6, 0.6])
    written = replace(plan, dispatch=tuple(i % 3 for i in range(plan.num_slots)))
    assert step_seconds(written, shape, RATES) == pytest.approx(step_seconds(plan, shape, RATES))
    side = steps_seconds([plan, written, replace(plan, dispatch=(0,)), replace(plan, dispatch=(1,))], shape, RATES)
    assert side[0] == side[1]
    assert side[3] > 1.4 * side[2]  # all on one card: the step is as long as that card is slow


def test_earliest_finish_is_that_of_the_schedules_on_paper():
    """The greedy order of plan/schedules.py, which moves nothing afterwards, is never better."""
    speeds = [1.0, 1.0, 0.4]
    plan = fine(6, 6)
    shape = replace(shape_of(6, speeds, weight=0), slot_seconds=0.0, boundary_bytes=0)
    forward = [StageTime(shape.loads[s.first].forward, 0.0) for s in plan.forward]
    backward = [StageTime(0.0, shape.loads[s.first].backward) for s in plan.backward]
    paper = round_pipe(forward, backward, 3, 6, speeds=speeds, dispatch="earliest_finish").makespan
    _, seconds = dispatched(plan, shape, AT_ONCE)
    assert seconds <= paper * (1 + 1e-9)


def test_a_partition_for_mixed_cards_with_room_lets_the_turns_fit_the_cards():
    shape = shape_of(6, [1.0, 0.5])
    costs = [LayerCost(load.forward, load.backward - load.forward) for load in shape.loads]
    seconds = partial(steps_seconds, shape=shape, rates=RATES)
    plan = balanced_plan(costs, 2, 8, 1, "layer", lambda plan: True, seconds)
    assert plan is not None
    alike = replace(shape, speeds=None)
    even = balanced_plan(
        costs, 2, 8, 1, "layer", lambda plan: True, partial(steps_seconds, shape=alike, rates=RATES)
    )
    assert even is not None
    assert step_seconds(plan, shape, RATES) < step_seconds(even, shape, RATES)
