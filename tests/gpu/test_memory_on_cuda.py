"""Under a cap on a GPU's memory that shrinks in mid-run the plan gets smaller, and no number changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.engines import plan_of
from support.recipes import WORDS, make_project, watch

from rpft.engine import host_memory
from rpft.engine.cuda import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 1024,
}
"""Some hundred MiB of buffers and two GiB of activations in one stage: far more than the allocator rounds to."""
SECTIONS = {
    "data": {"max_seq_len": 512, "truncation": "right"},
    "train": {"micro_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 8, "eval_every": 3},
    "engine": {"device": "cuda", "workers": 1, "kernels": "eager", "deterministic": True},
}


def long_rows(count):
    rng = random.Random(0)

    def said(words):
        return " ".join(rng.choice(WORDS) for _ in range(words))

    turns = ((("user", 5), ("assistant", rng.randint(300, 600))) for _ in range(count))
    return [{"messages": [{"role": role, "content": said(words)} for role, words in turn]} for turn in turns]


@pytest.fixture
def whole_memory():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def lower_cap(share):
    """From now on there is only that ``share`` of the most that was allocated; what is cached does not count."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share * torch.cuda.max_memory_allocated(0) / total, 0)
    torch.cuda.empty_cache()


def tighten(record):
    if record.step in (2, 6):
        lower_cap(0.75)
    elif record.step == 4:
        torch.cuda.reset_peak_memory_stats(0)


@pytest.mark.usefixtures("whole_memory")
@pytest.mark.parametrize("update", ["sync", "delayed"])
def test_under_a_shrinking_cap_plans_get_smaller_and_the_run_is_the_unbroken_one(update, tmp_path, monkeypatch):
    made = make_project(tmp_path, "llama", rows=long_rows(32), sections=SECTIONS, **SIZES)
    plan = tmp_path / "large.json"
    head = LAYERS + 1
    plan.write_text(plan_of([(0, LAYERS)], [(head, head), (0, LAYERS)], 2, "stage").to_json())
    words = (f"optimizer.update={update}", f"engine.plan={plan}")
    unbroken = made.train_well("unbroken", *words)
    with monkeypatch.context() as patch:
        watch(patch, tighten)
        outcome = made.train_well("capped", *words, "checkpoint.every_steps=2")
    assert len(outcome.smaller_plans) >= 2
    assert outcome.smaller_plans[0]["plan"]["recompute"] == "layer"
    assert outcome.smaller_plans[-1]["plan"]["micro_batch_size"] == 8
    assert outcome.numbers == unbroken.numbers
    assert outcome.result == unbroken.result
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    resumed = made.train_well("capped", *words, "checkpoint.every_steps=2", "--resume")
    assert resumed.numbers == unbroken.numbers


def test_a_device_without_a_limit_may_take_more_than_a_limited_one_before_it(whole_memory):
    torch.cuda.empty_cache()
    CudaDevice(0, 64 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")
    assert CudaDevice(0, None).allocate(256 << 20).numel() == 256 << 20


def test_a_refused_page_lock_leaves_no_error_to_the_next_kernel(monkeypatch):
    runtime = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, address, num_bytes, flags):
            assert int(runtime.cudaHostRegister(address, num_bytes, flags)) == 0
            code = runtime.cudaHostRegister(address, num_bytes, flags)  # a second time is refused
            runtime.cudaHostUnregister(address)
            return code

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(host_memory._PageLocking, "refused", False)
    memory = host_memory.page_locked(1 << 20)
    assert host_memory._PageLocking.refused
    there = torch.ones(1 << 20, dtype=torch.uint8, device="cuda:0")
    assert (memory.copy_(there) == 1).all()
