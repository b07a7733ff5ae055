"""Groups of experts as layers of a plan: no plan, number of workers or delay changes a bit; bills are exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import EXPERTS
from support.engines import Outcome, plan_of, random_plan, run_engine

from rpft.engine.cpu import CpuDevice
from rpft.model.adapters import LoraSettings, names_in_adapter
from rpft.model.whole_tensors import WholeTensors
from rpft.plan.bill import Workload, make_bill
from rpft.plan.estimate import ModelShape

LORA = LoraSettings(4, 8.0, 0.05, ["q_proj", "v_proj", "o_proj"], modules_to_save=("mlp.gate",))
LAYERS = 14
"""Embedding, four blocks of a front and two groups, head."""

ONE_STAGE = plan_of([(0, LAYERS - 2)], [(LAYERS - 1, LAYERS - 1), (0, LAYERS - 2)], 4, "stage")
ON_EXPERTS = LoraSettings(4, 8.0, 0.0, [], target_parameters=EXPERTS)
AS_GRAPHS = {"dtype": torch.bfloat16, "kernels": "trace"}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "in full": {"lora": None, "router_loss": 0.1},
    "adapters of experts": {"lora": replace(ON_EXPERTS, target_modules=["q_proj"])},
    "nf4 as graphs": {**AS_GRAPHS, "quantize": "nf4"},
    "in full as graphs": {**AS_GRAPHS, "lora": None},
}
EACH = [pytest.param(kind, marks=pytest.mark.slow) if "nf4" in kind else kind for kind in KINDS]

Checkpoints = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("functions_made_once")


def run(checkpoint: Checkpoints, *args: Any, **settings: Any) -> Outcome:
    return run_engine(checkpoint("qwen3_moe"), *args, **{"lora": LORA, "groups": 2, "steps": 2, **settings})


def known(figures: Iterable[float | None]) -> dict[int, float]:
    """Those that are not None, by their numbers."""
    return {number: figure for number, figure in enumerate(figures) if figure is not None}


@pytest.fixture(scope="module")
def on_one_worker(checkpoint: Checkpoints) -> Callable[[str], Outcome]:
    made: dict[str, Outcome] = {}

    def of(kind: str) -> Outcome:
        if kind not in made:  # as torch runs it: graphs are to give the same bits
            made[kind] = run(checkpoint, ONE_STAGE, 1, **{**KINDS[kind], "kernels": "eager"})
        return made[kind]

    return of


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
def test_no_plan_and_no_number_of_workers_changes_a_bit(
    kind: str, seed: int, checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    rng = random.Random(seed)
    plan, workers = random_plan(rng, LAYERS, rng.choice([2, 4])), rng.choice([1, 2, 3])
    assert run(checkpoint, plan, workers, delays_seed=seed, **KINDS[kind]).differences(on_one_worker(kind)) == []


@pytest.mark.parametrize("kind", ["float32", "in full", "adapters of experts"])
def test_a_run_in_groups_is_the_run_of_whole_blocks_but_for_roundings(
    kind: str, checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    plan = plan_of([(0, 2), (3, 4)], [(5, 5), (3, 4), (0, 2)], 4, "stage")
    whole, cut = run(checkpoint, plan, 2, **KINDS[kind], groups=1), on_one_worker(kind)
    for ours, theirs in zip(cut.results, whole.results, strict=True):
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert known(ours.layer_norms) == pytest.approx(known(theirs.layer_norms), rel=1e-4), "of blocks"
        assert known([ours.router_aux_loss]) == pytest.approx(known([theirs.router_aux_loss]), rel=1e-5)
    found, expected = (WholeTensors(each.store).named(names_in_adapter) for each in (cut, whole))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    "settings",
    [
        {"update_lag": 1},
        {"router_loss": 0.1, "lora": LoraSettings(4, 8.0, 0.0, ["q_proj"])},
        {"frozen": True},
        {"lora": None, "update_lag": 1},
        {"lora": ON_EXPERTS},
        pytest.param({"lora": ON_EXPERTS, "quantize": "nf4", "update_lag": 1}, marks=pytest.mark.slow),
        pytest.param({"lora": None, "state": "8bit", "moments": True}, marks=pytest.mark.slow),
    ],
    ids=[
        "delayed",
        "router loss",
        "frozen weights on the disk",
        "delayed, in full",
        "adapters of experts alone",
        "delayed adapters of quantised experts",
        "8-bit moments on the disk",
    ],
)
def test_so_it_is_with(settings: dict[str, Any], checkpoint: Checkpoints, tmp_path: Path) -> None:
    settings = dict(settings)
    for key in ("frozen", "moments"):
        if settings.pop(key, False):
            settings[f"{key}_in"] = tmp_path
    plan = plan_of([(0, 2), (3, 8)], [(9, 13), (4, 8), (2, 3), (0, 1)], 4, "layer")
    one, two = (run(checkpoint, each, n, **settings) for n, each in ((1, ONE_STAGE), (2, plan)))
    assert two.differences(one) == []


@pytest.mark.parametrize("kind", [each for each, kind in zip(EACH, KINDS, strict=True) if "graphs" in kind])
def test_kept_bytes_spare_a_recompute_and_change_no_bit(
    kind: str, checkpoint: Checkpoints, on_one_worker: Callable[[str], Outcome]
) -> None:
    plan = plan_of([(0, 4), (5, 8)], [(9, 13), (5, 8), (0, 4)], 4, "layer")
    keeping = replace(plan, keep_bytes_per_token=600)
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


def test_the_bill_counts_gradients_masters_and_moments_of_each_group(checkpoint: Checkpoints) -> None:
    plan = plan_of([(0, 2), (3, 5), (6, 8)], [(9, 13), (6, 8), (2, 5), (0, 1)], 4, "layer")
    devices: list[CpuDevice] = []

    def make_device(index: int) -> CpuDevice:
        devices.append(CpuDevice(index))
        return devices[-1]

    store = run(checkpoint, plan, 2, lora=None, steps=1, make_device=make_device).store
    layouts = [layer.layout for layer in store.layers]
    bill = make_bill(plan, layouts, Workload(ModelShape(64, 96, 320, 4), 24, 4, delayed=False))
    fixed = bill.device_parts["weight, gradient and hidden-state buffers"]
    assert [device.peak_bytes() for device in devices] == [fixed] * 2
    held = sum(each.nbytes for x in store.layers for each in (x.weights, x.gradient, x.master, x.state))
    assert bill.host_parts["weights, gradients, optimizer state"] == held
    (gate_up, down), count = ((4 * 2 * 32 * 64, 4 * 64 * 32), 2)
    for group in layouts[2:4]:
        assert group.grad_elements == group.num_trained == (gate_up + down) // count
