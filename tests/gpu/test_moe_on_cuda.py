"""Mixtures of experts on a GPU: gradients follow the forward's routing, and no plan changes a bit."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine
from support.layers import batch_of, random_ids, relative_error
from support.models import load

from rpft.model.functions import LayerFunctions
from rpft.model.kept import FromForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
LAYER = 2
CASES = [
    *(
        ("eager", kernels, f)
        for f in ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")
        for kernels in ("trace", "compile")
    ),
    ("trace", "compile", "deepseek_v3"),  # whose eager kernels record choices that no gradient needs
]


@pytest.mark.parametrize(("reference", "kernels", "family"), CASES)
def test_a_recompute_follows_the_routing_that_it_is_given(reference, kernels, family, checkpoint):
    """Both are given the choices of another hidden state, for which their own would differ."""
    device = torch.device("cuda", 0)
    loaded = load(checkpoint(family), BF16)
    weights = {name: w.to(device) for name, w in loaded.store.layer_weights(LAYER).items()}
    batch = batch_of(random_ids(2, 128).to(device))
    first, second, grad = (torch.randn(2, 128, 64, device=device, dtype=BF16) for _ in range(3))
    layout = loaded.store.layers[LAYER].layout
    theirs, ours = (LayerFunctions(loaded.skeleton, device, BF16, kind) for kind in (reference, kernels))
    _, parts = theirs.forward_keeping(LAYER, first, weights, batch, None, True, 0)
    buffer = torch.zeros(layout.choice_bytes(256), dtype=torch.uint8, device=device)
    for offset, part in parts:
        buffer[offset : offset + part.numel()].copy_(part)

    def gradients(functions, given):
        sums = {b.name: torch.zeros(b.shape, device=device) for b in layout.bindings if b.grad_offset is not None}
        _, kept = functions.keep(LAYER, second, weights, batch, None, frozenset(sums), True, False, given)
        return {**sums, "hidden": kept.backward(grad, sums).float()}

    expected, found = (gradients(each, FromForward(0, buffer)) for each in (theirs, ours))
    errors = {name: relative_error(found[name], each) for name, each in expected.items()}
    assert max(errors.values()) < 0.05, errors
    others = gradients(ours, None)
    experts = [name for name in expected if "experts" in name and name.endswith("proj")]
    assert all(relative_error(others[name], expected[name]) > 0.3 for name in experts), "else nothing was tried"


@pytest.mark.parametrize("kernels", ["eager", "trace", "compile"])
def test_no_plan_changes_a_bit_with_a_router_loss(kernels, checkpoint, make_device):
    settings = {"dtype": BF16, "kernels": kernels, "make_device": make_device, "steps": 2, "router_loss": 0.1}
    whole = plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "layer")
    split = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (1, 2), (0, 0)], 4, "layer")
    one = run_engine(checkpoint("qwen3_moe"), whole, 1, **settings)
    assert (one.results[0].router_aux_loss or 0) > 1
    assert run_engine(checkpoint("qwen3_moe"), split, 2, delays_seed=1, **settings).differences(one) == []
