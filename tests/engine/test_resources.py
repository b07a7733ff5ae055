"""Memory and threads: a worker holds exactly what the plan says, and nothing grows with the steps."""

import gc
import threading

import pytest
import torch
from support.engines import plan_of, random_batches, run_engine

from rpft.engine.cpu import CpuDevice
from rpft.model.adapters import LoraSettings
from rpft.plan.bill import Workload, make_bill
from rpft.plan.estimate import ModelShape
from rpft.plan.sizes import worker_sizes

PLANS = {
    "the whole model fused": plan_of([], [(0, 5)], 2, "stage"),
    "the head alone fused": plan_of([(0, 4)], [(5, 5), (0, 4)], 2, "layer"),
    "small stages": plan_of([(0, 0), (1, 3)], [(4, 5), (3, 3), (1, 2), (0, 0)], 2, "stage"),
}


@pytest.mark.parametrize("lora", [None, LoraSettings(4, 8.0, 0.0, "all-linear")], ids=["full", "LoRA"])
@pytest.mark.parametrize("name", PLANS)
def test_a_workers_buffers_are_exactly_what_the_plan_says(name, lora, checkpoint):
    devices = []

    def make_device(index):
        devices.append(CpuDevice(index))
        return devices[-1]

    outcome = run_engine(checkpoint("qwen3"), PLANS[name], 2, lora=lora, make_device=make_device)
    layouts = [layer.layout for layer in outcome.store.layers]
    boundary_bytes = 2 * 12 * 64 * 4
    sizes = worker_sizes(layouts, PLANS[name], boundary_bytes, torch.float32, 2 * 12)
    assert [device.peak_bytes() for device in devices] == [sizes.total_bytes] * 2
    stages = PLANS[name].forward + PLANS[name].backward
    assert sizes.weight_bytes == max(sum(layouts[i].region_bytes for i in stage.layers) for stage in stages)


@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
def test_twenty_steps_take_no_more_threads_and_no_more_boundaries_than_three(update_lag, checkpoint):
    threads = set()

    def batches_of(step):
        threads.add(threading.active_count())
        return random_batches(2, step, rows=1)

    plan = PLANS["small stages"]
    few, many = (
        run_engine(
            checkpoint("llama"),
            plan,
            2,
            steps=steps,
            batches_of=batches_of,
            update_lag=update_lag,
            evaluate_every=9,
        )
        for steps in (3, 50)
    )
    assert len(threads) == 1
    assert many.boundary_buffers == few.boundary_buffers
    assert not many.results[-1].skipped


def test_what_is_set_aside_during_a_run_is_collected_again_after_it(checkpoint):
    set_aside = []

    def settle(engine, optimizer):
        engine.settle()
        set_aside.append(gc.get_freeze_count())

    run_engine(checkpoint("llama"), PLANS["small stages"], steps=1, before_run=settle)
    assert set_aside[0] > 0
    assert gc.get_freeze_count() == 0


def test_rows_of_another_length_use_the_same_buffers(checkpoint):
    def batches_of(step):
        return random_batches(2, step, rows=1 + step % 2)

    outcomes = [
        run_engine(checkpoint("llama"), PLANS[name], n, batches_of=batches_of)
        for n, name in ((1, "the whole model fused"), (2, "small stages"))
    ]
    assert outcomes[0].differences(outcomes[1]) == []


@pytest.mark.parametrize("delayed", [False, True], ids=["sync", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLANS)
def test_the_bill_counts_the_store_exactly_and_never_too_few_hidden_states(name, dtype, delayed, checkpoint):
    plan = PLANS[name]
    outcome = run_engine(
        checkpoint("qwen3"), plan, 2, microbatches=4, dtype=dtype, evaluate_every=1, update_lag=int(delayed)
    )
    layers = outcome.store.layers
    shape = ModelShape(hidden_size=64, intermediate_size=96, vocab_size=320, itemsize=dtype.itemsize)
    work = Workload(shape, max_tokens=24, accumulation=4, delayed=delayed)
    bill = make_bill(plan, [layer.layout for layer in layers], work)
    buffers = [
        tensor.untyped_storage()
        for layer in layers
        for tensor in (layer.weights, layer.second, layer.gradient, layer.master, layer.exp_avg, layer.exp_avg_sq)
    ]
    held = {storage.data_ptr(): storage.nbytes() for storage in buffers if storage.nbytes()}
    assert bill.host_parts["weights, gradients, optimizer state"] == sum(held.values())
    boundaries = outcome.boundary_buffers * 24 * 64 * dtype.itemsize
    assert bill.host_parts["hidden states between stages"] >= boundaries
