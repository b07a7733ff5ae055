"""A step played through: what it must not depend on, what must make it longer, and what bounds it."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import random_plan
from support.steps import makespan, random_step, slot_times

from rpft.model.update_order import backward_order
from rpft.plan.costs import LayerLoad
from rpft.plan.plan import Plan, Stage
from rpft.plan.playback import play_back
from rpft.plan.pool import Pool, SlotWork
from rpft.plan.predict import even_seconds, predict, roof_seconds
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.simulate import Run, rounds_played, step_seconds, steps_seconds
from rpft.plan.step_shape import StepShape

seeds = st.integers(0, 10**6)


def a_step(seed, blocks=6, count=1):
    """(plans alike in all but their stages, shape, rates, costs)."""
    rng = random.Random(seed)
    costs, shape, rates, m = random_step(rng, blocks)
    recompute = rng.choice(["stage", "layer"])
    plans = [replace(random_plan(rng, blocks + 2, m), recompute=recompute) for _ in range(count)]
    return plans, shape, rates, costs


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_plans_side_by_side_take_what_each_takes_alone(seed):
    plans, shape, rates, _ = a_step(seed, count=12)
    together = steps_seconds(plans, shape, rates)
    assert together.tolist() == pytest.approx([step_seconds(plan, shape, rates) for plan in plans])


class Onlooker:
    def slot(self, number, worker, work, times):
        assert len(times.computed) > 0

    def update(self, begun, written):
        assert np.all(begun <= written)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_the_first_and_the_last_microbatch_of_a_slot_say_what_all_do(seed):
    plans, shape, rates, _ = a_step(seed, count=4)
    if seed % 2:
        rates = replace(with_shared_memory(rates, seed), workers_per_switch=2, switch_share=0.7)
        shape = replace(shape, speeds=[1.0 + worker % 3 for worker in range(shape.num_workers)], hop=0.1)
    some, every = Run(plans, shape, rates), Run(plans, shape, rates, Onlooker())
    assert len(every.microbatches) == plans[0].num_microbatches >= len(some.microbatches)
    assert some.play(6) == pytest.approx(every.play(6), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_where_only_compute_takes_time_an_exact_step_is_the_plain_rules_makespan(seed):
    (plan,), shape, _, costs = a_step(seed)
    loads = [LayerLoad(cost.forward, cost.with_recompute) for cost in costs]
    shape = replace(shape, loads=loads, boundary_bytes=0, delayed=False, slot_seconds=0.0)
    expected = makespan(slot_times(plan, costs), shape.num_workers, plan.num_microbatches, shape.rounds)
    assert step_seconds(plan, shape, AT_ONCE) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_late_steps_are_no_longer_than_exact_ones_and_no_shorter_than_the_busiest_part(seed):
    (plan,), shape, _, costs = a_step(seed)
    loads = [LayerLoad(cost.forward, cost.with_recompute) for cost in costs]
    shape = replace(shape, loads=loads, boundary_bytes=0, slot_seconds=0.0)
    late, exact = (step_seconds(plan, replace(shape, delayed=delayed), AT_ONCE) for delayed in (True, False))
    work = plan.num_microbatches * shape.rounds * sum(slot_times(plan, costs))
    assert work / shape.num_workers * (1 - 1e-9) <= late <= exact * (1 + 1e-9)
    if shape.num_workers == 1:
        assert late == pytest.approx(exact) == pytest.approx(work)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(["up", "down", "update", "forward", "backward", "boundary", "switch"]))
def test_no_exact_step_gets_shorter_when_anything_gets_slower(seed, what):
    (plan,), shape, rates, _ = a_step(seed)
    shape = replace(shape, delayed=False)
    before = step_seconds(plan, shape, rates)
    if what in ("up", "down", "update"):
        rates = replace(rates, **{what: getattr(rates, what) / 3})
    elif what == "switch":
        rates = replace(rates, workers_per_switch=2, switch_share=1.0)
    elif what == "boundary":
        shape = replace(shape, boundary_bytes=2 * shape.boundary_bytes)
    else:
        which = seed % len(shape.loads)
        loads = list(shape.loads)
        loads[which] = replace(loads[which], **{what: 2 * getattr(loads[which], what)})
        shape = replace(shape, loads=loads)
    assert step_seconds(plan, shape, rates) >= before * (1 - 1e-9)


def with_shared_memory(rates, seed):
    """``rates`` of a machine whose copies and updates hold one another up."""
    rng = random.Random(seed)
    return replace(rates, memory=1e6 * rng.uniform(0.2, 4), copies_beside=rng.uniform(0.2, 1))


def test_compute_is_no_further_ahead_of_what_goes_down_than_may_wait():
    """Otherwise a forward that keeps more than its link carries would seem to be over while most of it waits."""
    for compute, kept_down, pace in ((1.0, 3.0, 3.0), (3.0, 1.0, 3.0)):
        times = Pool(1, output_down=0.5).slot(0, np.zeros((8, 1)), SlotWork(compute=compute, kept_down=kept_down))
        assert times.computed[-1] == pytest.approx(8 * pace)
        assert times.delivered[-1] >= times.computed[-1] + 0.5


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_plans_side_by_side_share_no_memory(seed):
    plans, shape, rates, _ = a_step(seed, count=12)
    rates = with_shared_memory(rates, seed)
    together = steps_seconds(plans, shape, rates)
    assert together.tolist() == pytest.approx([step_seconds(plan, shape, rates) for plan in plans])


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(["up", "down", "update", "memory", "copies_beside", "forward", "boundary"]))
def test_no_exact_step_gets_shorter_when_anything_gets_slower_that_shares_the_memory(seed, what):
    (plan,), shape, rates, _ = a_step(seed)
    rates = with_shared_memory(rates, seed)
    shape = replace(shape, delayed=False)
    before = step_seconds(plan, shape, rates)
    if what == "boundary":
        shape = replace(shape, boundary_bytes=2 * shape.boundary_bytes)
    elif what == "forward":
        shape = replace(shape, loads=[replace(load, forward=2 * load.forward) for load in shape.loads])
    else:
        rates = replace(rates, **{what: getattr(rates, what) / 3})
    assert step_seconds(plan, shape, rates) >= before * (1 - 1e-9)


def test_an_exact_update_waits_for_the_bytes_that_the_forward_copies_and_a_late_one_for_all():
    plan, shape = even(weight_bytes=100, gradient_bytes=40, num_trained=100)
    shape = replace(shape, boundary_bytes=5)
    rates = Rates(1e4, 1e4, update=50.0, memory=30.0)
    begun, over = play_back(plan, shape, rates).updates[0][1]
    # 9 layers below the head go up once for the forward, and 4 microbatches carry an input of each.
    assert over - begun == pytest.approx(10 * 100 / 50 + 9 * (100 + 4 * 5) / 30)
    begun, over = play_back(plan, replace(shape, delayed=True), rates).updates[0][1]
    weights, gradients, carried = 9 * 2 * 100 + 100, 10 * 40, 4 * 5 * (2 * 9 + 2 * 19)
    assert over - begun == pytest.approx(10 * 100 / 50 + (weights + gradients + carried) / 30)


def test_copies_are_slower_while_an_update_goes_on_and_no_longer():
    pool = Pool(1, copies_beside=0.5)
    pool.update = np.array([[0.0], [10.0]])
    for number, (seconds, over) in enumerate([(4.0, 8.0), (2.0, 11.0), (3.0, 14.0)]):
        # The first is twice as long, the second has done one of its 2 seconds when the update ends.
        arrivals = np.zeros((1, 1))
        assert pool.slot(0, arrivals, SlotWork(compute=0.0, upload=seconds)).uploaded[0] == over, number
    idle = Pool(1, copies_beside=0.5)
    idle.update = np.array([[5.0], [10.0]])
    assert idle.slot(0, np.zeros((1, 1)), SlotWork(compute=0.0, upload=4.0)).uploaded[0] == 4.0


def even(blocks=8, **load):
    loads = [LayerLoad(1.0, 3.0, **load)] * (blocks + 2)
    head = blocks + 1
    plan = Plan(
        tuple(Stage(i, i) for i in range(head)),
        (Stage(head, head), *(Stage(i, i) for i in reversed(range(head)))),
        4,
        "layer",
    )
    return plan, StepShape(loads, 1, 0, 2, 1, False, slot_seconds=0.0)


def test_the_roof_is_every_layer_forward_recomputed_and_backward_and_the_head_once():
    plan, shape = even()
    # 9 layers of 1 + 3 and the head of 3, for each of 4 microbatches, on 2 workers.
    assert roof_seconds(plan, shape) == 4 * (9 * (1.0 + 3.0) + 3.0) / 2
    assert roof_seconds(plan, replace(shape, rounds=3)) == 3 * roof_seconds(plan, shape)
    assert roof_seconds(plan, replace(shape, speeds=(1.0, 0.5))) == roof_seconds(plan, shape) * 2 / 1.5
    found = predict(plan, shape, replace(AT_ONCE, update=1.0), tokens=1000.0)
    assert found.roof_tokens_per_second == 1000.0 / roof_seconds(plan, shape), "whatever else takes time"


def test_uploads_downloads_and_the_optimizer_each_bound_a_step():
    plan, shape = even(weight_bytes=100, gradient_bytes=100, num_trained=100)
    compute = step_seconds(plan, shape, AT_ONCE)
    per_worker = 2 * 10 * 100 / 2
    for name, seconds in (("up", 40 * per_worker / 100), ("down", 60 * per_worker / 2 / 100)):
        slow = step_seconds(plan, shape, replace(AT_ONCE, **{name: per_worker / seconds / 10}))
        assert slow >= max(10 * seconds * 0.45, compute)
    for delayed in (False, True):
        slow = step_seconds(plan, replace(shape, delayed=delayed), replace(AT_ONCE, update=1.0))
        assert slow >= 10 * 100  # every parameter, one a second


def test_a_late_update_hides_behind_the_next_step_and_an_exact_one_shows():
    plan, shape = even(num_trained=100)
    compute = step_seconds(plan, shape, AT_ONCE)
    rates = replace(AT_ONCE, update=10 * 100 / (0.5 * compute))
    late = step_seconds(plan, replace(shape, delayed=True), rates)
    assert late == pytest.approx(step_seconds(plan, replace(shape, delayed=True), AT_ONCE))
    assert step_seconds(plan, shape, rates) > 1.1 * compute


def with_an_update_of(share, plan, shape, rates):
    """Weights and an optimizer that takes such a share of a step whose workers are always busy."""
    loads = [replace(load, gradient_bytes=10**5, num_trained=10**5) for load in shape.loads]
    shape = replace(shape, loads=loads)
    return shape, replace(rates, update=len(loads) * 1e5 / (share * even_seconds(plan, shape)))


def test_a_late_gradient_lands_when_the_update_before_has_read_what_lies_there():
    plan, shape = even(gradient_bytes=10, num_trained=100)
    shape = replace(shape, delayed=True)
    compute = step_seconds(plan, shape, AT_ONCE)
    rates = Rates(np.inf, 10 / 3, update=10 * 100 / (3 * compute))
    played = play_back(plan, shape, rates)
    begins = {step: begun for step, (begun, _) in played.updates}
    layer_seconds = 100 / rates.update
    backward = [slot for slot in played.slots if slot.slot >= len(plan.forward)]
    held_up = 0
    for slot in backward:
        if slot.step - 1 not in begins:
            continue
        # The last layer is read first; a slot has one layer, whose gradient takes 3 seconds.
        read = begins[slot.step - 1] + (slot.slot - len(plan.forward) + 1) * layer_seconds
        landed = slot.gradients_down[-1][1]
        assert landed >= read + 3 - 1e-9
        held_up += landed == pytest.approx(read + 3)
    assert held_up > len(backward) / 2


def test_an_update_longer_than_all_else_takes_a_step_with_the_gradients_that_it_was_waited_for_by():
    plan, shape = even(gradient_bytes=10, num_trained=100)
    shape = replace(shape, delayed=True)
    update = 10 * step_seconds(plan, shape, AT_ONCE)
    rates = Rates(np.inf, 10 / 3, update=10 * 100 / update)
    # Embedding first or last, what lies in the host store is read, then the gradient of layer 0 comes down.
    assert step_seconds(plan, shape, rates) == pytest.approx(update + 3)


def test_two_late_steps_take_a_step_and_an_update_where_neither_can_hide_the_other():
    plan, shape = even(gradient_bytes=1, num_trained=100)
    shape = replace(shape, num_workers=10, delayed=True)
    rates = Rates(np.inf, np.inf, np.inf)
    alone = step_seconds(plan, replace(shape, delayed=False), rates)  # from the first upload to the last gradient
    update = 0.9 * alone
    slow = replace(rates, update=10 * 100 / update)
    # A step reads what the update before the last wrote, and its own update waits for its gradients.
    assert step_seconds(plan, shape, slow) == pytest.approx((alone + update) / 2)


def test_late_updates_go_in_the_order_of_the_host_store():
    assert backward_order([()] * 4) == [3, 2, 1, 0]
    assert backward_order([(), (), (), (0,)]) == [0, 3, 2, 1]


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.1, 2.0))
def test_late_steps_are_no_shorter_when_the_optimizer_is_slower(seed, share):
    plans, shape, rates, _ = a_step(seed, count=6)
    shape, rates = with_an_update_of(share, plans[0], replace(shape, delayed=True), rates)
    before = Run(plans, shape, rates).play(12)
    slower = Run(plans, shape, replace(rates, update=rates.update / 1.5)).play(12)
    assert np.all(slower >= before * (1 - 1e-9))


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_an_optimizer_that_takes_no_time_holds_no_late_gradient_up(seed):
    (plan,), shape, rates, _ = a_step(seed, blocks=10)
    shape, rates = with_an_update_of(1.0, plan, replace(shape, delayed=True, num_workers=1), rates)
    rates = replace(rates, update=np.inf)
    run, free = Run([plan], shape, rates), Run([plan], shape, rates)
    free.slots.asked[:, SlotWork._fields.index("read")] = -np.inf  # nothing that an update reads
    assert run.step_seconds() == pytest.approx(free.step_seconds())


def test_weights_that_another_layer_lends_are_waited_for():
    first, block, head = LayerLoad(50.0, 0.0), LayerLoad(1.0, 3.0), LayerLoad(1.0, 3.0, num_trained=100)
    plan = Plan((Stage(0, 1),), (Stage(2, 2), Stage(0, 1)), 1, "layer")
    rates = replace(AT_ONCE, update=1.0)
    own, lent = (
        step_seconds(plan, StepShape([load, block, head], 1, 0, 2, 1, False, slot_seconds=0.0), rates)
        for load in (first, replace(first, lenders=(2,)))
    )
    assert lent > own + 40


def test_weights_that_stay_are_not_uploaded():
    plan, shape = even(weight_bytes=100, frozen_bytes=100)
    rates = replace(AT_ONCE, up=1.0)
    assert step_seconds(replace(plan, resident=tuple(range(10))), shape, rates) == step_seconds(
        plan, shape, AT_ONCE
    )
    assert step_seconds(plan, shape, rates) > 900


def test_a_slower_worker_makes_the_turns_slower():
    plan, shape = even()
    alike = step_seconds(plan, shape, AT_ONCE)
    assert step_seconds(plan, replace(shape, speeds=[1.0, 1.0]), AT_ONCE) == alike
    assert step_seconds(plan, replace(shape, speeds=[1.0, 0.5]), AT_ONCE) > 1.5 * alike


@pytest.mark.parametrize("held_up", [False, True])
def test_late_steps_are_timed_where_starting_up_is_over(held_up):
    for seed in range(8):
        plans, shape, rates, _ = a_step(seed, blocks=12, count=6)
        shape = replace(shape, delayed=True)
        if held_up:
            shape, rates = with_an_update_of(1.2, plans[0], shape, rates)
        short = steps_seconds(plans, shape, rates)
        times = Run(plans, shape, rates).play(80)
        assert short.tolist() == pytest.approx(((times[79] - times[31]) / 48).tolist(), rel=0.03)


def test_keeping_more_loads_the_links():
    plan, shape = even()
    shape = replace(shape, boundary_bytes=1)
    rates = Rates(10.0, 10.0, np.inf)
    light = step_seconds(plan, shape, rates)
    assert step_seconds(replace(plan, keep_bytes_per_token=100), shape, rates) > light


def test_what_the_forward_kept_spares_backward_slots_but_not_the_fused_stage():
    loads = [LayerLoad(1.0, 3.0, spared=0.5)] * 4
    shape = StepShape(loads, 0, 0, 1, 1, False, slot_seconds=0.0)
    plan = Plan((Stage(0, 1),), (Stage(2, 3), Stage(1, 1), Stage(0, 0)), 2, "layer")
    assert step_seconds(plan, shape, AT_ONCE) == pytest.approx(2 * (2 * 1.0 + 2 * 3.0 + 2 * 2.5))


@pytest.mark.parametrize("delayed", [False, True])
def test_a_step_of_many_rounds_takes_what_it_does_with_each_of_them_played(delayed):
    rng = random.Random(1)
    for _ in range(12):
        costs, shape, rates, _ = random_step(rng, rng.choice([4, 9]))
        shape = replace(shape, delayed=delayed, rounds=rng.choice([41, 53]))
        plan = random_plan(rng, len(costs), rng.choice([1, 2, 4]))
        if plan.num_slots >= shape.num_workers:
            whole = float(Run([plan], shape, rates).step_seconds()[0])
            assert step_seconds(plan, shape, rates) == pytest.approx(whole, rel=0.02)


def test_what_is_played_of_a_step_does_not_grow_with_its_rounds():
    shape = StepShape([], 1, 1, 8, 997, False)
    (less, more), repeated = rounds_played(shape)
    assert more + repeated * (more - less) == 997
    assert more < 50
