"""The optimizer's update and copies at the same time on every GPU: rates that can be, and nothing left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rpft.engine.cuda import CudaDevice
from rpft.optim.one_pass import prepare
from rpft.train.beside import measure_beside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_all_gpus_copy_both_ways_beside_the_update_and_give_all_back():
    kernels = prepare()
    devices = [CudaDevice(index, None) for index in range(torch.cuda.device_count())]
    threads, held = threading.active_count(), [torch.cuda.memory_allocated(d.torch_device) for d in devices]
    started = time.perf_counter()
    alone, beside = measure_beside(devices, kernels)
    print(f"{time.perf_counter() - started:.1f} s: {alone / 1e9:.2f} G parameters/s alone; {beside}")
    assert 0 < beside.updates < 1.1 * alone
    assert 1e9 * len(devices) < beside.copied_alone < 200e9 * len(devices)
    assert 0 < beside.copied < 1.1 * beside.copied_alone
    assert threading.active_count() == threads
    assert [torch.cuda.memory_allocated(d.torch_device) for d in devices] == held
