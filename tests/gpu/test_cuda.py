"""The CUDA engine is the CPU pool's engine: same numbers, any plan, any number of workers, any timing."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.model.adapters import LoraSettings
from rpft.optim.one_pass import CompiledPass, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma3")
F32, BF16 = torch.float32, torch.bfloat16
SPLIT_FORWARD, SPLIT_BACKWARD = [(0, 1), (2, 4)], [(5, 5), (3, 4), (1, 2), (0, 0)]
WHOLE = plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "stage")
SPLIT = plan_of(SPLIT_FORWARD, SPLIT_BACKWARD, 2, "layer")
# A step in one round, as rounded gradients ask for; of one grain, since graphs of two are compiled differently.
WHOLE_BY_LAYER = plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "layer")
SPLIT_IN_ONE_ROUND = plan_of(SPLIT_FORWARD, SPLIT_BACKWARD, 4, "layer")
LORA = LoraSettings(4, 8, 0.1, "all-linear")


@pytest.fixture(scope="module")
def on_cpu(checkpoint):
    """on_cpu(family, lora) -> the outcome of the CPU pool in float32, by eager kernels."""
    known = {}

    def of(family, lora):
        if (family, lora) not in known:
            known[family, lora] = run_engine(checkpoint(family), WHOLE, lora=lora, steps=2)
        return known[family, lora]

    return of


@pytest.mark.parametrize(
    ("kernels", "family", "lora"),
    [
        *(("eager", family, lora) for family in FAMILIES for lora in (None, LORA)),
        *(("trace", family, lora) for family in ("llama", "qwen3") for lora in (None, LORA)),
        ("compile", "llama", LORA),
        ("compile", "qwen3", None),
    ],
    ids=lambda value: {None: "full", LORA: "LoRA with dropout"}.get(value, value),
)
def test_cuda_equals_the_cpu_pool_in_float32(kernels, family, lora, checkpoint, on_cpu, make_device):
    """To 1e-4 of the losses, which also show the updates, and 1e-3 of the gradients' norm."""
    workers = 1 if kernels == "compile" else 2  # a graph is compiled once a device
    settings = {"lora": lora, "steps": 2, "kernels": kernels, "make_device": make_device}
    cuda = run_engine(checkpoint(family), SPLIT, workers, **settings)
    cpu = on_cpu(family, lora)
    for a, b in zip(cpu.results, cuda.results, strict=True):
        assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-4)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
    assert cuda.eval_loss_sums == pytest.approx(cpu.eval_loss_sums, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "dtype", "update_lag", "workers"),  # every pair of a column's values with another's
    [
        ("llama", F32, 0, 3),
        ("llama", BF16, 1, 2),
        ("qwen3", F32, 1, 2),
        ("qwen3", BF16, 0, 3),
        ("gpt2", F32, 0, 2),
        ("gpt2", BF16, 1, 3),
        ("qwen3_moe", F32, 1, 3),
        ("qwen3_moe", BF16, 0, 2),
    ],
)
def test_plan_workers_and_timing_do_not_change_a_bit(family, dtype, update_lag, workers, checkpoint, make_device):
    folder = checkpoint(family)
    settings = {"dtype": dtype, "update_lag": update_lag, "make_device": make_device}
    one = run_engine(folder, WHOLE, 1, **settings)
    assert not any(result.skipped for result in one.results)
    other = run_engine(folder, SPLIT, workers, delays_seed=workers, **settings)
    assert one.differences(other) == []


@pytest.fixture(scope="module")
def compiled_update():
    kernels = prepare(num_threads=2)
    assert isinstance(kernels, CompiledPass), "the one-pass update could not be compiled"
    return kernels


@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
@pytest.mark.parametrize("kernels", ["trace", "compile"])
def test_graphs_and_rounded_gradients_are_the_same_bits_on_any_workers_with_any_timing(
    kernels, update_lag, checkpoint, make_device, compiled_update
):
    folder = checkpoint("llama")
    settings = {
        "dtype": BF16,
        "gradient_dtype": BF16,
        "kernels": kernels,
        "update_lag": update_lag,
        "one_pass": compiled_update,
        "make_device": make_device,
    }
    one = run_engine(folder, WHOLE_BY_LAYER, 1, **settings)
    assert not any(result.skipped for result in one.results)
    for workers, seed in ((1, 5), (2, 6)):
        other = run_engine(folder, SPLIT_IN_ONE_ROUND, workers, delays_seed=seed, **settings)
        assert one.differences(other) == [], f"{workers} workers, delays seed {seed}"
