"""What a forward keeps for its backward crosses the link unharmed, whatever attention kernel made it."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine
from support.layers import batch_of, random_ids, relative_error
from support.models import load

from rpft.model.functions import LayerFunctions
from rpft.model.kept import FromForward
from rpft.plan.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16


def keeping(num_bytes):
    plan = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (1, 2), (0, 0)], 4, "layer")
    return Plan(plan.forward, plan.backward, 4, "layer", num_bytes)


@pytest.mark.parametrize("num_bytes", [200, 10**6])
def test_any_budget_gives_the_bits_of_none(num_bytes, checkpoint, make_device):
    settings = {"dtype": BF16, "gradient_dtype": BF16, "kernels": "trace", "make_device": make_device}
    nothing = run_engine(checkpoint("qwen3"), keeping(0), 1, **settings)
    kept = run_engine(checkpoint("qwen3"), keeping(num_bytes), 2, delays_seed=3, **settings)
    assert kept.differences(nothing) == []


@pytest.mark.parametrize("kernels", ["trace", "compile"])
def test_a_block_resumed_from_a_flat_buffer_has_the_gradients_of_one_recomputed(kernels, checkpoint):
    """With the attention kernels of an ordinary run, which are not deterministic ones."""
    torch.use_deterministic_algorithms(False)
    device = torch.device("cuda", 0)
    loaded = load(checkpoint("qwen3"))
    functions = LayerFunctions(loaded.skeleton, device, BF16, kernels)
    weights = {name: w.to(device, BF16) for name, w in loaded.store.layer_weights(1).items()}
    batch = batch_of(random_ids(2, 128).to(device))
    hidden, grad = (torch.randn(2, 128, 64, device=device, dtype=BF16) for _ in range(2))

    def zeros():
        return {name: torch.zeros(w.shape, device=device) for name, w in weights.items()}

    expected = zeros()
    _, kept = functions.keep(1, hidden, weights, batch, None, frozenset(expected), True, False)
    grad_expected = kept.backward(grad, expected)
    for size, _ in functions.keep_options(1, hidden, weights, batch)[1::3]:
        _, parts = functions.forward_keeping(1, hidden, weights, batch, None, True, size)
        host = torch.empty(size, dtype=torch.uint8)
        for offset, part in parts:
            host[offset : offset + part.numel()].copy_(part)
        sums = zeros()
        given = FromForward(size, host.to(device))
        _, resumed = functions.keep(1, hidden, weights, batch, None, frozenset(sums), True, False, given)
        grad_hidden = resumed.backward(grad, sums)
        assert grad_hidden is not None
        assert relative_error(grad_hidden.float(), grad_expected.float()) < 0.02
        for name, total in expected.items():
            assert relative_error(sums[name], total) < 0.02, (size, name)
