"""Learning-rate schedules: end points, warm-up, and no state, so that a resumed run needs none."""

from itertools import pairwise

import pytest

from rpft.optim.schedule import Schedule

SHAPES = ["constant", "linear", "cosine", "wsd"]


@pytest.mark.parametrize("name", SHAPES)
def test_warm_up_rises_by_equal_amounts_to_the_peak_at_its_last_step(name):
    schedule = Schedule(name, peak=2.0, num_steps=100, warmup_ratio=0.1)
    assert schedule.warmup_steps == 10
    assert [schedule(step) for step in range(1, 11)] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert schedule(11) <= 2.0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.5])
def test_the_rate_never_rises_after_the_warm_up_and_ends_where_it_should(name, warmup_ratio):
    schedule = Schedule(name, 1e-3, 40, warmup_ratio, min_ratio=0.1)
    rates = [schedule(step) for step in range(1, 41)]
    after = rates[max(0, schedule.warmup_steps - 1) :]
    assert max(rates) <= 1e-3
    assert min(rates) > 0.0
    assert all(b <= a for a, b in pairwise(after))
    assert rates[-1] > 1e-4
    assert schedule(41) == pytest.approx(1e-3 if name == "constant" else 1e-4)


def test_linear_and_cosine_are_half_way_down_in_the_middle():
    for name in ("linear", "cosine"):
        assert Schedule(name, 1.0, 109, 10 / 109)(60) == pytest.approx(0.5)


@pytest.mark.parametrize("name", SHAPES)
def test_no_step_is_spent_at_a_rate_of_zero(name):
    assert min(Schedule(name, 1.0, 20, 0.1)(step) for step in range(1, 21)) > 0.0


def test_wsd_stays_at_the_peak_until_its_last_fifth():
    schedule = Schedule("wsd", 1.0, 100, 0.1, decay_ratio=0.2)
    assert {schedule(step) for step in range(10, 81)} == {1.0}
    assert schedule(81) == pytest.approx(1 - 1 / 21)
    assert schedule(100) == pytest.approx(1 / 21)


def test_wsd_with_a_warm_up_into_its_decay_falls_from_there():
    schedule = Schedule("wsd", 1.0, 10, 0.9, decay_ratio=0.5)
    assert schedule(9) == 1.0
    assert schedule(10) == pytest.approx(0.5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_of_one_step_has_a_rate(name):
    for warmup_ratio in (0.0, 0.5, 1.0):
        schedule = Schedule(name, 1.0, 1, warmup_ratio, min_ratio=0.5)
        assert 0.5 <= schedule(1) <= 1.0


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_is_a_function_of_the_step_alone(name):
    unbroken, resumed = (Schedule(name, 1e-3, 50, 0.1) for _ in range(2))
    in_order = [unbroken(step) for step in range(1, 51)]
    assert resumed(31) == in_order[30]
    assert [resumed(step) for step in range(50, 0, -1)] == in_order[::-1]
