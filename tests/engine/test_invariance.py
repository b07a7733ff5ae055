"""The promise above all: workers, partitions, recompute, M and timing change nothing, bit for bit.

A failing case replays from its own name: the seed decides the plan, the number of workers and every delay.
"""

import random
from dataclasses import replace

import pytest
import torch
from support.engines import plan_of, random_plan, run_engine
from support.fixtures import remembered

from rpft.engine.worker import Worker
from rpft.model.adapters import LoraSettings

MICROBATCHES = 5
LAYERS = 6
PLAIN = plan_of([(0, 4)], [(5, 5), (0, 4)], MICROBATCHES, "stage")
LORA = LoraSettings(r=4, alpha=8.0, dropout=0.2, target_modules="all-linear")

RUNS = {
    "llama": ("llama", {}),
    "llama delayed": ("llama", {"update_lag": 1}),
    "llama LoRA with dropout": ("llama", {"lora": LORA}),
    "llama LoRA with dropout, bf16": ("llama", {"lora": LORA, "dtype": torch.bfloat16}),
    "qwen3, tied": ("qwen3", {}),
    "qwen3, tied, bf16": ("qwen3", {"dtype": torch.bfloat16}),
    "qwen3, tied, bf16, delayed": ("qwen3", {"dtype": torch.bfloat16, "update_lag": 1}),
    "qwen3, tied, bf16, 8-bit moments": ("qwen3", {"dtype": torch.bfloat16, "state": "8bit"}),
    "llama delayed, bf16 moments": ("llama", {"update_lag": 1, "state": "bf16"}),
    "llama LoRA, bf16 moments": ("llama", {"lora": LORA, "state": "bf16"}),
    "gpt2 with dropout": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"max_grad_norm": None}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma2 LoRA on some blocks": (
        "gemma2",
        {"lora": LoraSettings(4, 8.0, 0.2, r".*layers\.(1|2)\..*(q_proj|down_proj)")},
    ),
}


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(name) -> the outcome of RUNS[name] on one worker, with the simplest plan and no delays."""
    return remembered(checkpoint, RUNS, PLAIN, MICROBATCHES)


def check_random_run(name, seed, expected, checkpoint):
    rng = random.Random(f"{name} {seed}")
    workers = rng.choice([1, 2, 3, 5])
    plan = random_plan(rng, LAYERS, rng.randint(1, workers + 2))
    print(f"{workers} workers, {plan}")
    family, settings = RUNS[name]
    outcome = run_engine(
        checkpoint(family), plan, workers, microbatches=MICROBATCHES, delays_seed=seed, **settings
    )
    assert outcome.differences(expected(name)) == []


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_any_plan_on_any_workers_with_any_timing_gives_the_same_bits(name, seed, expected, checkpoint):
    check_random_run(name, seed, expected, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
@pytest.mark.parametrize("name", RUNS)
def test_many_more_plans_and_timings_give_the_same_bits(name, seed, expected, checkpoint):
    check_random_run(name, seed, expected, checkpoint)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama LoRA with dropout", "qwen3, tied, bf16, delayed", "gpt2 with dropout"])
def test_any_order_of_workers_gives_the_same_bits(name, seed, expected, checkpoint):
    rng = random.Random(f"{name} {seed}")
    workers = rng.choice([2, 3, 4])
    plan = random_plan(rng, LAYERS, rng.randint(1, MICROBATCHES))
    slots = rng.choice([1, plan.num_slots, 2 * plan.num_slots + 1])  # shorter or longer than a step has
    plan = replace(plan, dispatch=tuple(rng.choice(range(workers)) for _ in range(slots)))
    print(f"{workers} workers, {plan}")
    family, settings = RUNS[name]
    outcome = run_engine(
        checkpoint(family), plan, workers, microbatches=MICROBATCHES, delays_seed=seed, **settings
    )
    assert outcome.differences(expected(name)) == []


def test_a_plan_gives_slots_to_the_workers_that_it_names(checkpoint, monkeypatch):
    seen = []
    enqueue = Worker.enqueue

    def note(self, slot):
        seen.append((self.device.name, slot.kind.value))
        enqueue(self, slot)

    monkeypatch.setattr(Worker, "enqueue", note)
    plan = replace(plan_of([(0, 1), (2, 3)], [(4, 5), (0, 3)], 3, "layer"), dispatch=(1, 1, 0, 2, 7))
    run_engine(checkpoint("llama"), plan, 3, steps=2, microbatches=5, evaluate_every=1)
    workers = [int(name.partition(":")[2]) for name, _ in seen]
    kinds = [kind for _, kind in seen]
    step = [1, 1, 0, 2, 1, 1, 1, 0]  # two rounds of four slots; there is no worker 7: it counts as 7 mod 3
    assert workers[:8] == step
    assert kinds[8:11] == ["forward", "forward", "loss"]
    begins = kinds.index("forward", kinds.index("loss"))
    assert step in [workers[i : i + 8] for i in range(begins, len(workers) - 7)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_more_workers_than_slots_or_fewer_give_the_same_bits(workers, recompute, expected, checkpoint):
    plan = plan_of([(0, 0), (1, 2)], [(3, 5), (0, 2)], 3, recompute)
    name = "gpt2 with dropout"
    outcome = run_engine(checkpoint("gpt2"), plan, workers, microbatches=MICROBATCHES, delays_seed=workers)
    assert outcome.differences(expected(name)) == []


@pytest.mark.parametrize("name", ["llama delayed", "qwen3, tied, bf16, delayed"])
@pytest.mark.parametrize("num_microbatches", [2, MICROBATCHES])
def test_delayed_updates_never_wait_for_an_upload_that_waits_for_them(
    name, num_microbatches, expected, checkpoint
):
    """Many backward slots on one worker: their gradients must land before the last weights can be uploaded."""
    layers = [(i, i) for i in range(5)]
    plan = plan_of(layers, [(5, 5), *reversed(layers)], num_microbatches, "stage")
    family, settings = RUNS[name]
    outcome = run_engine(checkpoint(family), plan, 1, microbatches=MICROBATCHES, **settings)
    assert outcome.differences(expected(name)) == []


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5])
def test_any_m_gives_the_same_bits_with_a_short_last_round_too(num_microbatches, expected, checkpoint):
    plan = plan_of([(0, 2), (3, 4)], [(5, 5), (2, 4), (0, 1)], num_microbatches, "stage")
    outcome = run_engine(checkpoint("qwen3"), plan, 3, microbatches=MICROBATCHES, delays_seed=num_microbatches)
    assert outcome.differences(expected("qwen3, tied")) == []


@pytest.mark.parametrize("name", ["llama", "qwen3, tied, bf16"])
def test_the_split_of_a_step_into_rounds_changes_no_bit(name, checkpoint):
    family, settings = RUNS[name]
    outcomes = [
        run_engine(
            checkpoint(family),
            plan_of([(0, 4)], [(5, 5), (2, 4), (0, 1)], m, "stage"),
            2,
            microbatches=12,
            steps=2,
            **settings,
        )
        for m in (1, 3, 12)
    ]
    assert outcomes[0].differences(outcomes[1]) == []
    assert outcomes[0].differences(outcomes[2]) == []


@pytest.mark.parametrize("name", ["llama", "llama delayed", "gpt2 with dropout"])
def test_an_evaluation_between_steps_changes_no_step_and_is_the_same_on_any_workers(name, expected, checkpoint):
    family, settings = RUNS[name]
    plans = (PLAIN, plan_of([(0, 1), (2, 3)], [(4, 5), (1, 3), (0, 0)], 2, "layer"))
    one, three = (
        run_engine(
            checkpoint(family), plan, n, microbatches=MICROBATCHES, evaluate_every=1, delays_seed=n, **settings
        )
        for n, plan in zip((1, 3), plans, strict=True)
    )
    assert three.differences(one) == []
    assert one.results == expected(name).results
    assert one.eval_loss_sums[-1] == expected(name).eval_loss_sums[-1]


def test_dropout_is_drawn_from_the_seed_in_training_and_off_in_evaluation(checkpoint):
    """Else the cases above would hold without any dropout."""
    one, other = (run_engine(checkpoint("gpt2"), PLAIN, steps=1, seed=s, learning_rate=0.0) for s in (3, 4))
    assert one.numbers != other.numbers
    assert one.eval_loss_sums == other.eval_loss_sums
