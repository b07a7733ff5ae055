"""On CUDA a quantised base is dequantised to the bits of the CPU, trains like it, and takes no more memory."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from support.engines import plan_of, run_engine

from rpft.model import quant_kernels
from rpft.model.adapters import LoraSettings
from rpft.model.quant import PackedWeight
from rpft.model.quant_weight import QuantizedWeight, open_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 4, "stage")
LORA = LoraSettings(4, 8, 0.0, "all-linear")
KINDS = ("nf4", "int8", "fp8")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def on_both(kind, shape, dtype, nested=True):
    """The same weight on the CPU and on CUDA, with what takes note of it there."""
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).mul_(0.05).to(dtype)
    packed = PackedWeight(kind, shape, dtype, nested)
    parts = {suffix: torch.zeros(s, dtype=d) for suffix, (s, d) in packed.part_shapes().items()}
    packed.quantize_into(value, parts)
    found = []
    for device in ("cpu", "cuda"):
        weights, notes = open_weights({f"w{s}": part.to(device) for s, part in parts.items()}, {"w": packed})
        found.append((weights["w"], notes))
    return found


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "in chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(192, 320), (3, 64, 96), (1000, 64)], ids=str)
def test_nf4_is_dequantised_to_the_bits_of_the_cpu(shape, nested, dtype, triton, monkeypatch):
    if triton:
        pytest.importorskip("triton")
        assert quant_kernels._triton_kernel() is not None
    else:
        monkeypatch.setattr(quant_kernels, "_triton_kernel", lambda: None)
        monkeypatch.setattr(quant_kernels, "_CHUNK_ELEMENTS", 640)
    (cpu, _), (cuda, _) = on_both("nf4", shape, dtype, nested)
    assert torch.equal(cuda.dequantized().cpu(), cpu.dequantized())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_dequantised_to_the_bits_of_the_cpu(dtype, kind):
    (cpu, _), (cuda, _) = on_both(kind, (192, 320), dtype)
    assert torch.equal(cuda.dequantized().cpu(), cpu.dequantized())


@pytest.mark.parametrize("kind", KINDS)
def test_between_forward_and_backward_no_weight_is_held(kind):
    _, (weight, notes) = on_both(kind, (1024, 4096), torch.bfloat16)
    assert isinstance(weight, QuantizedWeight)
    size = 1024 * 4096 * 2
    hidden = torch.randn(8, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with notes.made_again():  # once before, since libraries keep workspaces
        torch.autograd.grad(F.linear(hidden, weight).sum(), hidden)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with notes.made_again():
        output = F.linear(hidden, weight)
    assert torch.cuda.memory_allocated() - before < size // 8
    (grad,) = torch.autograd.grad(output.sum(), hidden)
    assert torch.cuda.memory_allocated() - before < size // 8
    assert torch.isfinite(grad).all()
    most = 1.2 if kind != "nf4" else 1.6 if quant_kernels._triton_kernel() is not None else 8
    assert torch.cuda.max_memory_allocated() - before < most * size


@pytest.mark.parametrize("kernels", ["eager", "trace"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_training_is_that_of_the_cpu_but_for_rounding(family, kind, kernels, checkpoint, make_device):
    settings = {"steps": 3, "lora": LORA, "quantize": kind}
    cpu = run_engine(checkpoint(family), PLAN, 2, **settings)
    cuda = run_engine(checkpoint(family), PLAN, 2, kernels=kernels, make_device=make_device, **settings)
    for ours, theirs in zip(cuda.results, cpu.results, strict=True):
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_train_like_traced_ones(kind, checkpoint, make_device):
    settings = {"steps": 2, "lora": LORA, "quantize": kind, "dtype": torch.bfloat16, "make_device": make_device}
    traced, compiled = (
        run_engine(checkpoint("llama"), PLAN, 2, kernels=kernels, **settings) for kernels in ("trace", "compile")
    )
    for ours, theirs in zip(compiled.results, traced.results, strict=True):
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-3)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)
