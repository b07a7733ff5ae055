"""Nothing grows with the steps on CUDA, and host memory is page-locked exactly and given back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import psutil
import pytest
import torch
from support.engines import plan_of, random_batches, run_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 2)], [(3, 3), (2, 2), (0, 1)], 2, "layer")
SETTLED_AFTER = 50
"""Steps until every cache is full; microbatches that stay on a worker take 32."""
GROWTH_BYTES = 32 << 20


def test_the_allocator_grows_its_segments_though_cuda_was_in_use_before_and_keeps_a_setting_of_ones_own():
    program = """if True:
        import torch
        torch.cuda.init()
        torch.cuda.mem_get_info()  # by now the allocator has read the environment
        from rpft.engine.cuda import CudaDevice
        CudaDevice(0, None)
        held = torch.empty(64 << 20, device="cuda")
        print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
    """
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    for set_before, expected in (
        ({}, "[True]"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "[False]"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program], env=plain | set_before, capture_output=True, text=True
        )
        assert ran.stdout.strip() == expected, ran.stderr


def in_use():
    """Reserved VRAM of each GPU, then threads and open files of the process."""
    reserved = [torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())]
    return [*reserved, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


def test_two_hundred_steps_take_no_more_than_fifty(checkpoint, make_device):
    held, resident = [], []

    def watch(engine, optimizer):
        submit, tickets = engine.submit_step, []

        def submit_and_watch(step, batches):
            if step > 2:  # two steps under way, as in training
                engine.wait(tickets.pop(0).losses)
            if step % SETTLED_AFTER == 0:
                held.append(in_use())
                resident.append(psutil.Process().memory_info().rss)
            tickets.append(submit(step, batches))
            return tickets[-1]

        engine.submit_step = submit_and_watch

    run_engine(
        checkpoint("llama", num_hidden_layers=2),
        PLAN,
        2,
        steps=4 * SETTLED_AFTER,
        batches_of=lambda step: random_batches(2, step),
        make_device=make_device,
        before_run=watch,
    )
    assert len(held) == 4
    for later in held[1:]:
        assert all(now <= settled for now, settled in zip(later, held[0], strict=True)), (held[0], later)
    assert max(resident) - resident[0] <= GROWTH_BYTES


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
