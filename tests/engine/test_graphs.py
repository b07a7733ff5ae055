"""Layers that run as graphs keep the promise of the engine: no plan, worker or timing changes a bit of a run."""

import random

import pytest
import torch
from support.engines import HostBatch, plan_of, random_plan, run_engine
from support.fixtures import remembered

from rpft.model.adapters import LoraSettings

MICROBATCHES = 5
LAYERS = 6
PLAIN = plan_of([(0, 4)], [(5, 5), (0, 4)], MICROBATCHES, "stage")
LORA = LoraSettings(r=4, alpha=8.0, dropout=0.2, target_modules=["q_proj", "down_proj"])
ROUNDED = {"dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16}

pytestmark = pytest.mark.usefixtures("functions_made_once")

RUNS = {
    "gpt2 with dropout": ("gpt2", {}),
    "llama LoRA with dropout, bf16": ("llama", {"lora": LORA, "dtype": torch.bfloat16}),
    "qwen3, tied, rounded gradients, delayed": ("qwen3", {**ROUNDED, "update_lag": 1}),
    "qwen3_moe, bf16": ("qwen3_moe", {"dtype": torch.bfloat16}),
}


def mixed_batches(step):
    """Four microbatches of two shapes: one of them packs, one without a trained token."""
    generator, batches = torch.Generator().manual_seed(step), []
    for number, (rows, length) in enumerate([(2, 12), (1, 7), (2, 12), (1, 7)]):
        ids = torch.randint(3, 320, (rows, length), generator=generator)
        labels = torch.full((rows, length), -100)
        if number != 1:
            labels[:, 1:-1] = ids[:, 2:]
        first = 2 + step
        parts = [torch.arange(first), torch.arange(length - first)]
        positions = torch.cat(parts).repeat(rows, 1) if number == 2 else None
        flat = labels.flatten()
        trained_at = (flat >= 0).nonzero().flatten()
        batches.append(HostBatch(ids, positions, trained_at, flat[trained_at]))
    return batches


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(name) -> the outcome of RUNS[name] run by torch on one worker, with the simplest plan."""
    return remembered(checkpoint, RUNS, PLAIN, MICROBATCHES)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize("name", RUNS)
def test_graphs_give_the_bits_of_torchs_own_run_with_any_plan(name, seed, expected, checkpoint, caplog):
    rng = random.Random(f"{name} {seed}")
    workers, (family, settings) = rng.choice([1, 2, 3]), RUNS[name]
    one_round = "gradient_dtype" in settings
    plan = random_plan(rng, LAYERS, MICROBATCHES if one_round else rng.randint(1, workers + 2))
    print(f"{workers} workers, {plan}")
    outcome = run_engine(
        checkpoint(family),
        plan,
        workers,
        microbatches=MICROBATCHES,
        delays_seed=seed,
        kernels="trace",
        **settings,
    )
    assert outcome.differences(expected(name)) == []
    assert "cannot be traced" not in caplog.text


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt2", {}), pytest.param("gemma3", {**ROUNDED, "update_lag": 1}, marks=pytest.mark.slow)],
    ids=["gpt2", "gemma3"],
)
def test_shapes_packs_and_evaluations_that_take_turns_give_the_same_bits_with_any_plan(
    family, settings, checkpoint
):
    plans = {1: PLAIN, 2: plan_of([(0, 0), (1, 2)], [(3, 5), (2, 2), (0, 1)], MICROBATCHES, "layer")}
    one, two = (
        run_engine(
            checkpoint(family),
            plan,
            workers,
            steps=2,
            batches_of=mixed_batches,
            evaluate_every=1,
            delays_seed=workers,
            kernels="trace",
            **settings,
        )
        for workers, plan in plans.items()
    )
    assert two.differences(one) == []
    eager = run_engine(checkpoint(family), PLAIN, steps=2, batches_of=mixed_batches, **settings)
    for mine, theirs in zip(one.results, eager.results, strict=True):
        # The head fills up its chunks for graphs, which changes the order of sums.
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
