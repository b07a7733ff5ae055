"""Mixture of experts: experts without a token have a gradient of zero and hold nothing up; tokens on the edge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import plan_of, run_engine
from support.models import tiny_model

from rpft.model.cut import cut
from rpft.model.functions import LayerFunctions
from rpft.optim.adamw import AdamW
from rpft.plan.bill import Workload, make_bill
from rpft.plan.estimate import ModelShape
from rpft.plan.sizes import RESULTS_IN_FLIGHT

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_without_a_token_stay_as_they_are(tmp_path: Path, family: str):
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                # All experts tie, for every token alike, and the same ones are always chosen.
                parameter.zero_()
    model.save_pretrained(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "experts" in name}
    assert before
    store = run_engine(tmp_path, PLAN, 2, steps=1, algorithm=AdamW()).store
    for name, weights in before.items():
        after = store.tensor(name)
        moved = [not torch.equal(after[expert], weights[expert]) for expert in range(weights.shape[0])]
        assert sum(moved) == 2, f"{name}: {moved}"


ONLY_THE_HEAD_AT_ONCE = {
    grain: plan_of([(0, 2), (3, 4)], [(5, 5), (3, 4), (0, 2)], 2, grain) for grain in ("stage", "layer")
}


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize(
    ("grain", "kernels"),
    [
        ("stage", "eager"),
        pytest.param("layer", "eager", marks=pytest.mark.slow),
        pytest.param("stage", "trace", marks=pytest.mark.slow),
        pytest.param("layer", "trace", marks=pytest.mark.slow),
    ],
)
def test_a_recompute_that_rounds_otherwise_sends_no_token_to_another_expert(
    grain, kernels, saved, checkpoint, monkeypatch
):
    """All but the same scores for all experts, and as much noise on those of the recompute: they are a toss-up."""
    dtype = torch.float32 if kernels == "eager" else torch.bfloat16

    def on_the_edge(engine, optimizer):
        store = engine._controller._store
        for name in store.names():
            if name.endswith("mlp.gate.weight"):
                store.write(name, 1e-4 * store.tensor(name))

    keep = LayerFunctions.keep

    def with_noise(self, layer, hidden, weights, *args, **kwargs):
        noisy = {n: 1e-4 * torch.randn_like(w) for n, w in weights.items() if n.endswith("mlp.gate.weight")}
        return keep(self, layer, hidden, {**weights, **noisy}, *args, **kwargs)

    def gradients():
        settings = {"steps": 1, "dtype": dtype, "kernels": kernels, "before_run": on_the_edge}
        if not saved:
            monkeypatch.setattr("support.engines.cut", lambda model: replace(cut(model), choices=((),) * 4))
        store = run_engine(
            checkpoint("qwen3_moe"), ONLY_THE_HEAD_AT_ONCE[grain], 2, delays_seed=1, **settings
        ).store
        experts = [name for name in store.names() if "experts" in name]
        return torch.cat([store.trained_view(name, "gradient").flatten() for name in experts])

    expected = gradients()
    monkeypatch.setattr(LayerFunctions, "keep", with_noise)
    error = float((gradients() - expected).norm() / expected.norm())
    assert error < 0.02 if saved else error > 0.5


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_bill_counts_what_travels_of_choices(grain, checkpoint):
    plan, pools = ONLY_THE_HEAD_AT_ONCE[grain], []
    outcome = run_engine(
        checkpoint("deepseek_v3"), plan, 2, before_run=lambda e, o: pools.append(e._controller._kept)
    )
    layouts = [layer.layout for layer in outcome.store.layers]
    work = Workload(ModelShape(64, 96, 320, 4), max_tokens=24, accumulation=4, delayed=False)
    bill = make_bill(plan, layouts, work)
    (pool,) = pools
    assert pool.num_buffers == 3 * plan.num_microbatches, "the first block of this model has no experts"
    assert bill.host_parts["kept for the backward"] == pool.num_buffers * pool._num_bytes
    # Two blocks of a stage with three choices each, of 256 bytes at least.
    at_once, sent = (2, 2) if grain == "stage" else (1, 2)
    assert bill.device_parts["choices of routers"] == (at_once + RESULTS_IN_FLIGHT * sent) * 3 * 256
    dense = [replace(layout, choices=()) for layout in layouts]
    assert make_bill(plan, dense, work).host_parts["kept for the backward"] == 0
