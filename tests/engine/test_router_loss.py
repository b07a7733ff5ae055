"""Mixtures of experts train like a plain loop, with and without the load-balancing loss of their routers."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.adapters import EXPERTS
from support.engines import plan_of, random_batches, random_plan, run_engine
from support.layers import batch_of, functions_of, random_ids, relative_error, zero_sums
from support.models import load, tiny_config
from support.plain_loop import plain_loop
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.router_loss import LOSS, WEIGHT, chosen_coefficient, load_balancing_loss
from rpft.optim.adamw import AdamW

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 3, "stage")
ALGORITHM = AdamW(weight_decay=0.1, eps=1e-6)
BALANCED = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")
COEFFICIENT = 0.5
"""Large, so that it shows."""

LORA = LoraSettings(4, 8.0, 0.0, ["q_proj", "v_proj"])


def batches_of(step):
    return random_batches(4, step)


def balance(output, batch, into=None):
    """The mean over layers of transformers' loss of each layer, times the microbatch's trained tokens."""
    layers = [
        torch.as_tensor(load_balancing_loss_func((scores,), scores.shape[-1], 2))
        for scores in output.router_logits
    ]
    loss = batch.targets.numel() * torch.stack(layers).mean()
    if into is not None:
        into.append(loss.item())
    return COEFFICIENT * loss


def both(folder, steps, coefficient):
    ours = run_engine(
        folder,
        PLAN,
        2,
        steps=steps,
        batches_of=batches_of,
        algorithm=ALGORITHM,
        learning_rate=1e-3,
        router_loss=coefficient,
    )
    seen: list[float] = []
    theirs = plain_loop(
        folder,
        steps,
        batches_of,
        learning_rate=1e-3,
        weight_decay=ALGORITHM.weight_decay,
        eps=ALGORITHM.eps,
        max_grad_norm=1.0,
        router_loss=partial(balance, into=seen) if coefficient else None,
    )
    return ours, theirs, seen


@pytest.mark.parametrize(
    ("family", "coefficient"),
    [
        ("deepseek_v3", 0.0),
        *((family, COEFFICIENT) for family in BALANCED),
        *(pytest.param(family, 0.0, marks=pytest.mark.slow) for family in BALANCED),
    ],
)
def test_mixtures_of_experts_train_like_a_plain_loop(family, coefficient, checkpoint):
    ours, theirs, seen = both(checkpoint(family), 4, coefficient)
    assert [r.loss_sum for r in ours.results] == pytest.approx(theirs.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in ours.results] == pytest.approx(theirs.grad_norms, rel=1e-5)
    distances = {
        name: float((ours.store.master(name) - weight).norm() / weight.norm())
        for name, weight in theirs.weights.items()
    }
    assert max(distances.values()) < 1e-5, distances
    if not coefficient:
        assert {result.router_aux_loss for result in ours.results} == {None}
        return
    for step, result in enumerate(ours.results):
        trained = sum(batch.targets.numel() for batch in batches_of(step + 1))
        assert result.router_aux_loss == pytest.approx(sum(seen[4 * step : 4 * step + 4]) / trained, rel=1e-5)


def test_it_changes_what_is_learnt_and_no_loss_that_is_reported(checkpoint):
    without, with_it = (
        run_engine(checkpoint("qwen3_moe"), PLAN, steps=2, router_loss=each).results for each in (0.0, 0.5)
    )
    assert with_it[0].loss_sum == without[0].loss_sum
    assert with_it[0].grad_norm != pytest.approx(without[0].grad_norm, rel=1e-5)
    assert with_it[1].loss_sum != without[1].loss_sum


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"lora": LORA}, torch.float32),
        pytest.param({"kernels": "trace"}, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param({"kernels": "trace", "lora": LORA}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_plan_changes_a_bit_of_it(settings, dtype, checkpoint):
    rng, folder = random.Random(1), checkpoint("qwen3_moe")
    run = partial(run_engine, folder, steps=2, dtype=dtype, router_loss=0.1)
    expected = run(plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "stage"), **{**settings, "kernels": "eager"})
    assert expected.results[0].router_aux_loss is not None
    for workers in (1, 3):
        plan = replace(random_plan(rng, 6, 2), keep_bytes_per_token=0)
        assert run(plan, workers, delays_seed=workers, **settings).differences(expected) == [], plan


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"lora": replace(LORA, target_modules=[], target_parameters=EXPERTS)}),
        (
            "qwen3_next",
            {
                "lora": replace(LORA, target_modules=["shared_expert.down_proj"]),
                "kernels": "trace",
                "dtype": torch.bfloat16,
            },
        ),
    ],
    ids=["eager", "trace"],
)
def test_a_router_with_nothing_trained_up_to_its_scores_has_a_loss_and_no_gradient(family, settings, checkpoint):
    folder, plan = checkpoint(family, num_hidden_layers=1), plan_of([(0, 1)], [(2, 2), (0, 1)], 4, "stage")
    without, with_it = (
        run_engine(folder, plan, steps=2, router_loss=each, **settings).results for each in (0.0, 0.5)
    )
    assert [r.router_aux_loss for r in with_it] == [pytest.approx(2.0, abs=1.0)] * 2
    assert [(r.loss_sum, r.grad_norm) for r in with_it] == [(r.loss_sum, r.grad_norm) for r in without]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
def test_compiled_layers_add_the_same_loss_but_for_rounding(checkpoint):
    loaded = load(checkpoint("mixtral", num_experts_per_tok=4), torch.bfloat16)
    loaded.skeleton.router_loss = 0.5
    batch, found = batch_of(random_ids()), {}
    hidden, grad = (torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    for kernels in ("eager", "compile"):
        functions = functions_of(loaded, torch.bfloat16, kernels=kernels)
        sums = {**zero_sums(loaded.store, 1), LOSS: torch.zeros(()), WEIGHT: torch.tensor(8.0)}
        _, kept = functions.keep(
            1, hidden, loaded.store.layer_weights(1), batch, None, frozenset(sums), True, False, None
        )
        found[kernels] = {**sums, "hidden": kept.backward(grad, sums)}
    errors = {n: relative_error(found["compile"][n].float(), e.float()) for n, e in found["eager"].items()}
    assert max(errors.values()) < 0.04, errors
    assert found["eager"][LOSS].item() > 8


def test_it_is_k_where_the_load_is_even_and_grows_as_experts_are_left_out():
    picked = torch.arange(8).view(-1, 2) % 4
    even = load_balancing_loss(torch.zeros(4, 4), picked)
    assert even.item() == pytest.approx(2.0)
    one_sided = torch.tensor([5.0, 5.0, 0.0, 0.0]).expand(4, 4)
    assert load_balancing_loss(one_sided, torch.tensor([[0, 1]] * 4)).item() > 3.9


def test_the_coefficient_is_that_of_the_recipe_or_of_the_model_and_refused_where_there_is_no_such_loss():
    config = tiny_config("mixtral", router_aux_loss_coef=0.02)
    assert chosen_coefficient("model", config) == 0.02
    assert chosen_coefficient(0.3, config) == 0.3
    assert chosen_coefficient(0.0, tiny_config("llama")) == 0.0
    for family in ("llama", "deepseek_v3"):
        with pytest.raises(UserError, match=r"train\.router_aux_loss 0\.1: model '\w+' has no router"):
            chosen_coefficient(0.1, tiny_config(family))
