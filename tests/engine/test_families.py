"""Every family with all that lets a large model fit, against plain peft and an 8-bit AdamW in lines of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import peft_change
from support.eight_bits import EightBitAdamW
from support.engines import plan_of, random_batches, run_engine
from support.plain_loop import PlainOutcome, plain_loop
from support.quantised import as_dequantised

from rpft.model.adapters import LoraSettings
from rpft.model.host_store import HostStore
from rpft.optim.adamw import AdamW

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")
ALGORITHM = AdamW(weight_decay=0.1, eps=1e-6)
SEED, STEPS = 3, 3
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral", "phi3")]
DENSE = ("llama", "qwen3", "gemma3", *MORE)
TARGETS = {"deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"], "phi3": ["qkv_proj", "o_proj"]}


def batches_of(step: int) -> list[Any]:
    return random_batches(2, step)


def check_equal(folder: Path, rate: float, change: Any = lambda model: model, **settings: Any) -> HostStore:
    """Trains ``folder`` with 8-bit moments, here and plainly, and gives the store."""
    ours = run_engine(
        folder,
        PLAN,
        2,
        steps=STEPS,
        batches_of=batches_of,
        learning_rate=rate,
        algorithm=ALGORITHM,
        seed=SEED,
        state="8bit",
        **settings,
    )

    def plainly(optimizer_class: Any) -> tuple[PlainOutcome, float]:
        theirs = plain_loop(
            folder,
            STEPS,
            batches_of,
            learning_rate=rate,
            weight_decay=ALGORITHM.weight_decay,
            eps=ALGORITHM.eps,
            max_grad_norm=1.0,
            change=change,
            optimizer_class=optimizer_class,
        )
        masters = {name: ours.store.master(name.removeprefix("base_model.model.")) for name in theirs.weights}
        return theirs, max(float((masters[n] - w).norm() / w.norm()) for n, w in theirs.weights.items())

    theirs, distance = plainly(EightBitAdamW)
    assert [r.loss_sum for r in ours.results] == pytest.approx(theirs.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in ours.results] == pytest.approx(theirs.grad_norms, rel=1e-4)
    # A moment that lies between two levels may come to the other one, and few do.
    assert distance < 1e-3
    _, of_exact_moments = plainly(torch.optim.AdamW)
    assert of_exact_moments > 10 * distance
    return ours.store


@pytest.mark.parametrize("family", [*MIXTURES, *DENSE])
def test_lora_over_nf4_on_the_disk_with_8_bit_moments_is_plain_peft(
    family: str, checkpoint: Any, tmp_path: Path
) -> None:
    folder, targets = checkpoint(family), TARGETS.get(family, ["q_proj", "v_proj", "o_proj"])
    lora = LoraSettings(4, 8.0, 0.0, targets)
    change = peft_change(folder, lora, SEED, lambda model: as_dequantised(model, "nf4"))
    assert check_equal(folder, 1e-2, change, lora=lora, quantize="nf4", frozen_in=tmp_path).on_disk


@pytest.mark.parametrize(
    "family", [*MIXTURES[2:], *(pytest.param(m, marks=pytest.mark.slow) for m in MIXTURES[:2])]
)
def test_in_full_with_8_bit_moments_it_is_a_plain_loop(family: str, checkpoint: Any) -> None:
    check_equal(checkpoint(family), 1e-3)
