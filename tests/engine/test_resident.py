"""Frozen weights that stay on the workers are uploaded once and change no bit."""

from dataclasses import replace

import pytest
from support.engines import plan_of, run_engine

from rpft.engine.cpu import CpuDevice
from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.plan.sizes import worker_sizes

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer")
LORA = LoraSettings(4, 8.0, 0.1, "all-linear")
SMALL = LoraSettings(4, 8.0, 0.1, r".*(q_proj|down_proj)")
"""Whose graphs are made in a fraction of the time."""
RESIDENT = [(1, 3), (0, 1, 2, 3, 4, 5)]

pytestmark = pytest.mark.usefixtures("functions_made_once")


@pytest.fixture(scope="module")
def nothing_stays(checkpoint):
    known = {}

    def of(family, lora, kernels):
        key = (family, lora, kernels)
        if key not in known:
            known[key] = run_engine(checkpoint(family), PLAN, lora=lora, kernels=kernels, evaluate_every=2)
        return known[key]

    return of


@pytest.mark.parametrize("resident", RESIDENT, ids=str)
@pytest.mark.parametrize(
    ("family", "lora", "kernels"),
    [
        ("llama_tied", SMALL, "trace"),
        pytest.param("llama_tied", LORA, "trace", marks=pytest.mark.slow),
        ("gpt2", LORA, "eager"),
    ],
    ids=["llama_tied-some-trace", "llama_tied-trace", "gpt2-eager"],
)
def test_what_stays_changes_no_bit(family, lora, kernels, resident, checkpoint, nothing_stays):
    plan = replace(PLAN, resident=resident)
    settings = {"lora": lora, "kernels": kernels, "evaluate_every": 2, "delays_seed": len(resident)}
    outcome = run_engine(checkpoint(family), plan, 3, **settings)
    assert outcome.differences(nothing_stays(family, lora, kernels)) == []


@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
def test_layers_that_are_trained_whole_are_uploaded_all_the_same(update_lag, checkpoint):
    one = run_engine(checkpoint("llama"), PLAN, update_lag=update_lag)
    other = run_engine(checkpoint("llama"), replace(PLAN, resident=(1, 2)), 2, update_lag=update_lag)
    assert one.differences(other) == []


@pytest.mark.parametrize("resident", RESIDENT, ids=str)
def test_less_goes_up_and_the_memory_is_what_the_plan_says(resident, checkpoint):
    uploaded, devices = [], []

    def make_device(index):
        devices.append(CpuDevice(index))
        return devices[-1]

    def watch(engine, optimizer):
        for worker in engine._workers:
            enqueue = worker.enqueue

            def watched(slot, enqueue=enqueue):
                uploaded.append(sum(copy.source.numel() for copy in slot.weights))
                enqueue(slot)

            worker.enqueue = watched

    def run(plan):
        uploaded.clear()
        devices.clear()
        settings = {"lora": LORA, "make_device": make_device, "before_run": watch}
        return run_engine(checkpoint("llama"), plan, 2, **settings), sum(uploaded)

    _, everything = run(PLAN)
    plan = replace(PLAN, resident=resident)
    outcome, less = run(plan)
    layouts = [layer.layout for layer in outcome.store.layers]
    rounds = 3 * 2 + 2  # three steps of two, and an evaluation's two, which have no backward
    uses = {layer: rounds + (0 if layer >= 4 else 3 * 2) for layer in resident}
    assert everything - less == sum(layouts[layer].frozen_bytes * count for layer, count in uses.items())
    sizes = worker_sizes(layouts, plan, 2 * 12 * 64 * 4, outcome.store.gradient_dtype, 2 * 12)
    assert [device.peak_bytes() for device in devices] == [sizes.total_bytes] * 2


def test_a_layer_that_is_none_is_refused():
    with pytest.raises(UserError, match="resident"):
        replace(PLAN, resident=(6,)).check(6)
