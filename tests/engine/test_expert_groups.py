"""Groups of experts as layers of a plan: no plan, number of workers or delay changes a bit; bills are exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import Outcome, plan_of, random_plan, run_engine

from rpft.model.adapters import LoraSettings
from rpft.plan.bill import ModelShape, Workload, make_bill

LORA = LoraSettings(4, 8.0, 0.05, ["q_proj", "v_proj", "o_proj"], modules_to_save=("mlp.gate",))
LAYERS = 14
"""Embedding, four blocks of a front and two groups, head."""

ONE_STAGE = plan_of([(0, LAYERS - 2)], [(LAYERS - 1, LAYERS - 1), (0, LAYERS - 2)], 4, "stage")
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "nf4 as graphs": {"dtype": torch.bfloat16, "kernels": "trace", "quantize": "nf4"},
}

Checkpoints = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("functions_made_once")


def run(checkpoint: Checkpoints, *args: Any, **settings: Any) -> Outcome:
    return run_engine(checkpoint("qwen3_moe"), *args, **{"lora": LORA, "groups": 2, "steps": 2, **settings})


@pytest.fixture(scope="module")
def on_one_worker(checkpoint: Checkpoints) -> Callable[[str], Outcome]:
    known: dict[str, Outcome] = {}

    def of(kind: str) -> Outcome:
        if kind not in known:
            known[kind] = run(checkpoint, ONE_STAGE, 1, **KINDS[kind])
        return known[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
def test_no_plan_and_no_number_of_workers_changes_a_bit(
    kind: str, seed: int, checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    rng = random.Random(seed)
    plan, workers = random_plan(rng, LAYERS, rng.choice([2, 4])), rng.choice([1, 2, 3])
    assert run(checkpoint, plan, workers, delays_seed=seed, **KINDS[kind]).differences(on_one_worker(kind)) == []


def test_a_run_in_groups_is_the_run_of_whole_blocks_but_for_roundings(
    checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    plan = plan_of([(0, 2), (3, 4)], [(5, 5), (3, 4), (0, 2)], 4, "stage")
    whole, cut = run(checkpoint, plan, 2, groups=1), on_one_worker("float32")
    for (loss, norm), (loss_of_cut, norm_of_cut) in zip(whole.numbers, cut.numbers, strict=True):
        assert loss_of_cut == pytest.approx(loss, rel=1e-6)
        assert norm_of_cut == pytest.approx(norm, rel=1e-4)
    for name in whole.store.names():
        if whole.store.layers[whole.store.layer_of(name)].layout.own[name][0].trained:
            assert torch.allclose(cut.store.tensor(name), whole.store.tensor(name), rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    "settings",
    [
        {"update_lag": 1},
        {"router_loss": 0.1, "lora": LoraSettings(4, 8.0, 0.0, ["q_proj"])},
        pytest.param({"frozen": True}, id="frozen weights on the disk"),
    ],
    ids=["delayed", "router loss", "on the disk"],
)
def test_so_it_is_with(settings: dict[str, Any], checkpoint: Checkpoints, tmp_path: Path) -> None:
    if settings.pop("frozen", False):
        settings["frozen_in"] = tmp_path
    plan = plan_of([(0, 2), (3, 8)], [(9, 13), (4, 8), (2, 3), (0, 1)], 4, "layer")
    one, two = (run(checkpoint, each, n, **settings) for n, each in ((1, ONE_STAGE), (2, plan)))
    assert two.differences(one) == []


def test_kept_bytes_spare_a_recompute_and_change_no_bit(
    checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    plan = plan_of([(0, 4), (5, 8)], [(9, 13), (5, 8), (0, 4)], 4, "layer")
    keeping = replace(plan, keep_bytes_per_token=600)
    kind = "nf4 as graphs"
    assert run(checkpoint, keeping, 2, **KINDS[kind]).differences(on_one_worker(kind)) == []


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_bill_counts_what_crosses_between_layers_by_its_width(grain: str, checkpoint: Checkpoints) -> None:
    plan, pools = plan_of([(0, 2), (3, 5), (6, 8)], [(9, 13), (6, 8), (2, 5), (0, 1)], 4, grain), []
    outcome = run(checkpoint, plan, 2, before_run=lambda engine, _: pools.extend({*engine._boundaries}))
    layouts = [layer.layout for layer in outcome.store.layers]
    bill = make_bill(plan, layouts, Workload(ModelShape(64, 96, 320, 4), 24, 4, delayed=False))
    assert len(pools) == 3
    assert len([pool for pool in pools if pool.num_buffers]) == (3 if grain == "layer" else 2)
    crossing = sum(pool.num_buffers * pool._num_bytes for pool in pools)
    assert bill.host_parts["hidden states between stages"] == crossing
    # One hidden state, or two or three with two weights of 4 bytes and two numbers of 2, a byte an element.
    assert {pool._num_bytes // 24 // 4 for pool in pools} == {64, 2 * 64 + 12, 3 * 64 + 12}
