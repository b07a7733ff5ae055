"""A step whose loss or gradient is not finite changes nothing, is counted, and the next one goes on."""

import math

import pytest
import torch
from support.engines import plan_of, random_batches, run_engine

from rpft.model.layout import ALIGNMENT_ELEMENTS

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")
MICROBATCHES = 4


def poison(kind):
    """before_run: the heads of all workers spoil the microbatches that are marked bad."""

    def before_run(engine, optimizer):
        for worker in engine._workers:
            head = worker._functions.head
            function = head.loss_and_gradients

            def spoilt(hidden, weights, batch, sums, key, function=function):
                loss, grad = function(hidden, weights, batch, sums, key)
                if getattr(batch.targets, "is_bad", False):
                    if kind == "loss":
                        loss = loss * math.nan
                    elif kind == "gradient of the head":
                        next(iter(sums.values())).view(-1)[7] = math.inf
                    else:
                        grad[0, 3, 5] = math.nan
                return loss, grad

            head.loss_and_gradients = spoilt

    return before_run


def batches_with(bad_steps, seeds):
    """batches_of: step s has the rows of seeds[s - 1]; the last microbatch of a bad step is marked."""

    def batches_of(step):
        batches = random_batches(MICROBATCHES, seeds[step - 1])
        batches[-1].targets.is_bad = step in bad_steps
        return batches

    return batches_of


def run(folder, kind, seeds, bad_steps=(), **settings):
    return run_engine(
        folder,
        PLAN,
        2,
        steps=len(seeds),
        batches_of=batches_with(bad_steps, seeds),
        before_run=poison(kind),
        **settings,
    )


def state(outcome):
    layers = outcome.store.layers
    weights = [outcome.store.tensor(name) for name in outcome.store.names()]
    masters = [layer.master_values() for layer in layers]
    return [*weights, *masters, *(layer.exp_avg for layer in layers), *(layer.exp_avg_sq for layer in layers)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(state(a), state(b), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["loss", "gradient of the head", "gradient of a hidden state"])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_goes_on(kind, dtype, checkpoint):
    folder = checkpoint("qwen3")
    good = run(folder, kind, seeds=[1, 3], dtype=dtype)
    spoilt = run(folder, kind, seeds=[1, 2, 3], bad_steps=[2], dtype=dtype)
    assert same(spoilt, good)
    assert [r.skipped for r in spoilt.results] == [False, True, False]
    assert [r.skipped_in_a_row for r in spoilt.results] == [0, 1, 0]
    assert [r.skipped_steps for r in spoilt.results] == [0, 1, 1]
    bad = spoilt.results[1]
    assert not (math.isfinite(bad.loss_sum) and math.isfinite(bad.grad_norm))
    assert spoilt.eval_loss_sums == good.eval_loss_sums


def test_steps_skipped_in_a_row_are_counted_and_leave_the_start_untouched(checkpoint):
    folder = checkpoint("llama")
    outcome = run(folder, "loss", seeds=[1, 2, 3], bad_steps=[1, 2, 3])
    assert [r.skipped_in_a_row for r in outcome.results] == [1, 2, 3]
    untouched = run_engine(folder, PLAN, 1, steps=1, learning_rate=0.0)
    for layer, start in zip(outcome.store.layers, untouched.store.layers, strict=True):
        assert torch.equal(layer.weights, start.weights)
        assert not layer.exp_avg.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delayed_update_is_skipped_too(dtype, checkpoint):
    folder = checkpoint("llama")
    good = run(folder, "loss", seeds=[1], update_lag=1, dtype=dtype)
    spoilt = run(folder, "loss", seeds=[1, 2], bad_steps=[2], update_lag=1, dtype=dtype)
    assert same(spoilt, good)
    assert [r.skipped for r in spoilt.results] == [False, True]


def test_padding_between_tensors_stays_zero(checkpoint):
    """Else it would count in the norm."""
    outcome = run(checkpoint("gpt2"), "none", seeds=[1, 2])
    for layer in outcome.store.layers:
        used = torch.zeros(layer.layout.num_trained, dtype=torch.bool)
        for spec, offset in layer.layout.own.values():
            start = offset // spec.dtype.itemsize
            used[start : start + spec.num_elements] = True
        assert layer.layout.num_trained % ALIGNMENT_ELEMENTS == 0
        for flat in (layer.master_values(), layer.exp_avg, layer.gradient[: layer.layout.num_trained]):
            assert not flat[~used].any()
