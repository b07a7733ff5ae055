"""Packed rows by variable lengths give what they give with masks, and what each row gives alone."""

from __future__ import annotations

import pytest
import torch
from support.layers import batch_of, random_ids, relative_error
from support.models import load

from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.packed_attention import NAME, row_starts, varlen_attention
from rpft.model.packed_trial import adopt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
LENGTHS = ((70, 30, 28), (5, 123))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in line]) for line in LENGTHS])


def packed_batch(ids: torch.Tensor) -> DeviceBatch:
    batch = batch_of(ids, positions=POSITIONS.to(ids.device))
    return DeviceBatch(
        ids, batch.position_ids, batch.trained_at, batch.targets, row_starts(POSITIONS).to(ids.device)
    )


@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_is_attention_within_rows(window):
    device, total = torch.device("cuda", 0), POSITIONS.numel()
    starts = row_starts(POSITIONS).to(device)
    query = torch.randn(total, 4, 32, device=device, dtype=BF16, requires_grad=True)
    key, value = (torch.randn(total, 2, 32, device=device, dtype=BF16, requires_grad=True) for _ in range(2))
    grad = torch.randn(total, 4, 32, device=device, dtype=BF16)
    found = varlen_attention(query, key, value, starts, 128, 0.2, window)
    grads = torch.autograd.grad(found, (query, key, value), grad)

    at = torch.arange(total, device=device)
    row = torch.searchsorted(starts.long(), at, right=True)
    seen = (row[:, None] == row) & (at <= at[:, None])
    if window is not None:
        seen &= at[:, None] - at < window
    q, k, v = (t.detach().float().requires_grad_() for t in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.2
    expected = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(2, 1)
    )
    assert relative_error(found.float(), expected) < 0.02
    for a, b in zip(grads, torch.autograd.grad(expected, (q, k, v), grad.float()), strict=True):
        assert relative_error(a.float(), b) < 0.02


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((family, "eager") for family in ("llama", "qwen3", "mistral", "gemma3", "cohere")),
        ("qwen3", "trace"),
        ("mistral", "compile"),
    ],
)
def test_blocks_have_the_outputs_and_gradients_that_they_have_with_masks(family, kernels, checkpoint):
    device = torch.device("cuda", 0)
    loaded = load(checkpoint(family))
    weights = {name: w.to(device, BF16) for name, w in loaded.store.layer_weights(1).items()}
    batch = packed_batch(random_ids(2, 128).to(device))
    hidden, grad = (torch.randn(2, 128, 64, device=device, dtype=BF16) for _ in range(2))

    def run(functions: LayerFunctions) -> list[torch.Tensor]:
        sums = {name: torch.zeros(w.shape, device=device) for name, w in weights.items()}
        output, kept = functions.keep(1, hidden, weights, batch, None, frozenset(sums), True, True)
        grad_hidden = kept.backward(grad, sums)
        assert output is not None
        assert grad_hidden is not None
        return [output.float(), grad_hidden.float(), *sums.values()]

    masked = run(LayerFunctions(loaded.skeleton, device, BF16, kernels))
    functions = LayerFunctions(loaded.skeleton, device, BF16, kernels)
    assert adopt(functions) is None
    assert functions.attention == NAME
    for number, (a, b) in enumerate(zip(run(functions), masked, strict=True)):
        assert relative_error(a, b) < 0.03, number


def test_a_row_gives_in_a_pack_what_it_gives_alone(checkpoint):
    device = torch.device("cuda", 0)
    loaded = load(checkpoint("qwen3"))
    functions = LayerFunctions(loaded.skeleton, device, BF16)
    weights = {name: w.to(device, BF16) for name, w in loaded.store.layer_weights(1).items()}
    assert adopt(functions) is None
    ids = random_ids(2, 128).to(device)
    hidden = torch.randn(2, 128, 64, device=device, dtype=BF16)
    packed = functions.forward(1, hidden, weights, packed_batch(ids), None)
    for line, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = functions.forward(
                1, hidden[line : line + 1, part], weights, batch_of(ids[line : line + 1, part]), None
            )
            assert relative_error(packed[line, part].float(), alone[0].float()) < 0.01
            start += length


def test_float32_keeps_its_masks(checkpoint):
    functions = LayerFunctions(load(checkpoint("llama")).skeleton, torch.device("cuda", 0), torch.float32)
    assert adopt(functions)
    assert functions.attention == "sdpa"
