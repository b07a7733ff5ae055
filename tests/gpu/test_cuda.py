"""The CUDA engine is the CPU pool's engine: same numbers, any plan, any number of workers; memory is exact."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.engines import plan_of, run_engine
from support.models import tiny_checkpoint

from rpft.model.adapters import LoraSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WHOLE = plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "stage")
SPLIT = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (1, 2), (0, 0)], 2, "layer")
LORA = LoraSettings(4, 8, 0.1, "all-linear")


def cuda_worker(index: int):
    """Worker ``index``; on a machine with fewer GPUs several workers share one, which the protocol allows."""
    from rpft.engine.cuda import CudaDevice

    return CudaDevice(index % torch.cuda.device_count(), None)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_cuda_equals_the_cpu_pool_in_float32(tmp_path: Path, family: str, lora: LoraSettings | None):
    tiny_checkpoint(tmp_path, family)
    on_cpu = run_engine(tmp_path, WHOLE, lora=lora)
    on_cuda = run_engine(tmp_path, SPLIT, 2, lora=lora, make_device=cuda_worker)
    for a, b in zip(on_cpu.results, on_cuda.results, strict=True):
        assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-4)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
    assert on_cuda.eval_loss_sums == pytest.approx(on_cpu.eval_loss_sums, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
def test_plan_and_workers_do_not_change_a_bit(tmp_path: Path, family: str, dtype: torch.dtype, update_lag: int):
    tiny_checkpoint(tmp_path, family)
    one = run_engine(tmp_path, WHOLE, 1, dtype=dtype, update_lag=update_lag, make_device=cuda_worker)
    for workers, seed in ((2, 1), (3, 2)):
        other = run_engine(
            tmp_path,
            SPLIT,
            workers,
            dtype=dtype,
            update_lag=update_lag,
            make_device=cuda_worker,
            delays_seed=seed,
        )
        assert one.differences(other) == [], f"{workers} workers, delays seed {seed}"


def test_device_memory_and_streams_stay_flat_over_steps(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama")
    run_engine(tmp_path, SPLIT, 2, steps=5, make_device=cuda_worker)
    gc.collect()
    torch.cuda.synchronize()
    reserved = []

    def watch(engine, optimizer):
        submit = engine.submit_step

        def submit_and_watch(step, batches):
            reserved.append(torch.cuda.memory_reserved())
            return submit(step, batches)

        engine.submit_step = submit_and_watch

    run_engine(tmp_path, SPLIT, 2, steps=50, make_device=cuda_worker, before_run=watch)
    assert reserved[-1] == reserved[10]


def test_host_memory_is_page_locked_to_the_byte():
    from rpft.engine.host_memory import page_locked

    for size in (1, 4096, (1 << 20) + 1):
        tensor = page_locked(size)
        assert tensor.numel() == size
        assert tensor.is_pinned()


def test_page_locked_memory_is_given_back():
    from rpft.engine.host_memory import page_locked

    for _ in range(8):  # an address that is still registered would be refused
        page_locked(1 << 24).fill_(1)
        gc.collect()


def test_refused_page_locking_is_said_once_and_copies_still_work(monkeypatch, caplog):
    from rpft.engine import host_memory

    class Refusing:
        def cudaHostRegister(self, *arguments):
            return 1

    monkeypatch.setattr(host_memory._PageLocking, "refused", False)
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    tensors = [host_memory.page_locked(4096) for _ in range(3)]
    assert len([r for r in caplog.records if "page-lock" in r.message]) == 1
    for tensor in tensors:
        assert not tensor.is_pinned()
        on_device = torch.empty(4096, dtype=torch.uint8, device="cuda")
        on_device.copy_(tensor.fill_(7), non_blocking=True)
        assert on_device.sum().item() == 7 * 4096
