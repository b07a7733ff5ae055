"""A step played back: the same step that the planner counts, with every slot, copy and update where it was."""

import random
from itertools import pairwise

import pytest
from support.engines import random_plan

from rpft.plan.costs import LayerLoad
from rpft.plan.playback import play_back
from rpft.plan.rates import ASSUMED_RATES
from rpft.plan.simulate import slot_works, step_seconds
from rpft.plan.step_shape import StepShape


def a_step(seed, delayed, rounds=2):
    """(plan, shape) of 8 layers."""
    rng = random.Random(seed)
    loads = [
        LayerLoad(
            rng.uniform(0.02, 0.1),
            rng.uniform(0.1, 0.3),
            weight_bytes=rng.randint(1, 20) * 10**7,
            gradient_bytes=rng.randint(1, 20) * 10**7,
            num_trained=rng.randint(1, 10) * 10**7,
        )
        for _ in range(8)
    ]
    plan = random_plan(rng, 8, 4)
    return plan, StepShape(loads, 1000, 10**7, 3, rounds, delayed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("delayed", [False, True])
def test_the_step_that_is_played_back_takes_what_the_planner_counts_and_has_every_slot(seed, delayed):
    plan, shape = a_step(seed, delayed)
    played = play_back(plan, shape, ASSUMED_RATES)
    seconds = played.end_seconds - played.start_seconds
    # Steps of late updates are not all alike: workers take turns with longer and shorter slots.
    assert seconds == pytest.approx(step_seconds(plan, shape, ASSUMED_RATES), rel=0.2 if delayed else 1e-9)
    own = [slot for slot in played.slots if slot.step == played.step]
    assert [(slot.round, slot.slot) for slot in own] == [(r, s) for r in range(2) for s in range(plan.num_slots)]
    assert [slot.worker for slot in played.slots] == [n % 3 for n in range(len(played.slots))]
    works = slot_works(plan, shape, ASSUMED_RATES)
    for slot in own:
        assert sum(b - a for a, b in slot.computed) == pytest.approx(4 * works[slot.slot].compute)
        assert sum(b - a for a, b in slot.weights_up) == pytest.approx(works[slot.slot].upload)
        assert bool(slot.gradients_down) == (played.kind(slot.slot) != "forward")


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_computes_one_thing_at_a_time_and_only_with_its_weights(seed):
    plan, shape = a_step(seed, delayed=True)
    played = play_back(plan, shape, ASSUMED_RATES)
    for worker in range(3):
        slots = [slot for slot in played.slots if slot.worker == worker]
        stretches = [stretch for slot in slots for stretch in slot.computed]
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(stretches))
        for slot in slots:
            assert slot.weights_up[-1][1] <= slot.computed[0][0] + 1e-9


def test_an_exact_step_begins_with_the_update_of_the_one_before_and_a_late_update_runs_beside_the_next():
    plan, shape = a_step(1, delayed=False)
    played = play_back(plan, shape, ASSUMED_RATES)
    begun = dict(played.updates)
    assert begun[played.step - 1][0] == pytest.approx(played.start_seconds)
    plan, shape = a_step(1, delayed=True)
    played = play_back(plan, shape, ASSUMED_RATES)
    ends = [
        slot.gradients_down[-1][1] for slot in played.slots if slot.step == played.step and slot.gradients_down
    ]
    assert dict(played.updates)[played.step][0] == pytest.approx(max(ends))
