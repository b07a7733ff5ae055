"""Mixture of experts: experts without a token have a gradient of zero and hold nothing up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import plan_of, run_engine
from support.models import tiny_model

from rpft.optim.adamw import AdamW

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
