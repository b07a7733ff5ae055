"""From how many tokens on compute hides the rest of a step: ``benchmarks/hiding.py``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rpft.plan.costs import LayerLoad
from rpft.plan.rates import Rates
from rpft.plan.step_shape import StepShape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from hiding import HiddenFrom, by_the_rule, hidden_from

PARAMS, TOKENS, FLOPS = 10**8, 4096, 1e14
RATES = Rates(up=25e9, down=25e9, update=2e9)
PRODUCT = 2 * PARAMS * TOKENS / FLOPS
BLOCK = LayerLoad(PRODUCT, 3 * PRODUCT, weight_bytes=2 * PARAMS, gradient_bytes=2 * PARAMS, num_trained=PARAMS)
NOTHING = LayerLoad(0.0, 0.0)
HEAD = LayerLoad(PRODUCT, 0.0)
"""Its forward is in its backward, none here."""


def shape_of(*blocks: LayerLoad, workers: int = 2) -> StepShape:
    return StepShape([NOTHING, *blocks, HEAD], TOKENS, 0, workers, rounds=1, delayed=True)


def test_the_rule_holds_where_products_of_weights_are_all_there_is():
    expected = HiddenFrom(FLOPS / 25e9, FLOPS / 25e9 / 3, 2 * FLOPS / (8 * 2e9))
    assert by_the_rule(shape_of(BLOCK, BLOCK), RATES) == pytest.approx(expected)
    assert hidden_from(shape_of(BLOCK, BLOCK), RATES) == pytest.approx(expected)


def test_half_the_link_takes_twice_the_tokens_and_a_worker_more_takes_more_for_the_update_alone():
    found = hidden_from(shape_of(BLOCK), RATES)
    slow = hidden_from(shape_of(BLOCK), replace(RATES, up=12.5e9))
    assert slow == pytest.approx(found._replace(forward=2 * found.forward, backward=2 * found.backward))
    assert hidden_from(shape_of(BLOCK, workers=4), RATES) == pytest.approx(found._replace(update=2 * found.update))


def test_what_takes_longest_down_or_up_counts_and_what_stays_on_the_worker_does_not():
    found = hidden_from(shape_of(replace(BLOCK, gradient_bytes=4 * PARAMS)), RATES)
    assert found.backward == pytest.approx(2 * found.forward / 3)
    frozen = replace(BLOCK, frozen_bytes=2 * PARAMS, gradient_bytes=0, num_trained=0)
    assert hidden_from(shape_of(frozen, frozen), RATES, resident=[1, 2]) == (0.0, 0.0, 0.0)
    assert hidden_from(shape_of(frozen, BLOCK), RATES, resident=[1]).forward == pytest.approx(found.forward / 2)


def test_a_step_of_more_rounds_needs_as_many_tokens_in_each():
    assert HiddenFrom(30.0, 10.0, 50.0).step(rounds=1) == 50.0
    assert HiddenFrom(30.0, 10.0, 50.0).step(rounds=2) == 60.0
