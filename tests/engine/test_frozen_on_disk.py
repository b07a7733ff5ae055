"""Frozen weights in a file, read ahead slot by slot, change no bit of a run that has them in RAM."""

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import plan_of, run_engine
from support.models import load

from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import EngineError, Failure
from rpft.engine.streams import Delays
from rpft.engine.worker import Worker
from rpft.model import frozen_file
from rpft.model.adapters import LoraSettings
from rpft.model.frozen_file import frozen_file_bytes, frozen_files
from rpft.plan.sizes import WorkerSizes, frozen_bytes_up, worker_sizes

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer")
LORA = LoraSettings(4, 8.0, 0.1, ["q_proj", "down_proj"])
WHOLE_HEAD = replace(LORA, modules_to_save=("lm_head",))

pytestmark = pytest.mark.usefixtures("functions_made_once")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"lora": LORA}),
    "tied": ("qwen3", {"lora": LORA}),
    "head trained whole": ("llama", {"lora": WHOLE_HEAD}),
    "nf4": ("llama", {"lora": LORA, "quantize": "nf4"}),
    "nf4 experts": ("mixtral", {"lora": replace(LORA, target_modules=["q_proj"]), "quantize": "nf4"}),
    "int8": ("llama", {"lora": LORA, "quantize": "int8"}),
    "bfloat16, delayed": ("llama", {"lora": LORA, "dtype": torch.bfloat16, "update_lag": 1}),
}
SLOW = {"untied", "int8", "nf4 experts", "head trained whole"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_the_numbers_are_those_of_ram_for_any_workers_and_delays(name, checkpoint, tmp_path):
    family, settings = CASES[name]
    settings = {**settings, "steps": 2}
    in_ram = run_engine(checkpoint(family), PLAN, **settings)
    for workers, seed in ((1, 5), (2, 6)):
        on_disk = run_engine(checkpoint(family), PLAN, workers, **settings, frozen_in=tmp_path, delays_seed=seed)
        assert on_disk.store.on_disk
        assert on_disk.differences(in_ram) == []


def test_what_stays_on_a_worker_is_brought_up_once(checkpoint, tmp_path):
    in_ram = run_engine(checkpoint("qwen3"), PLAN, lora=LORA)
    plan = replace(PLAN, resident=(0, 1, 3))
    assert run_engine(checkpoint("qwen3"), plan, 2, lora=LORA, frozen_in=tmp_path).differences(in_ram) == []


@pytest.mark.parametrize("resident", [(), (0, 1, 3)], ids=str)
def test_it_reads_what_the_plan_says_and_takes_two_stages_of_ram(resident, checkpoint, tmp_path):
    plan, read, allocated = replace(PLAN, resident=resident), [], []

    class Device(CpuDevice):
        def allocate_host(self, num_bytes):
            allocated.append(num_bytes)
            return super().allocate_host(num_bytes)

    def watch(engine, optimizer):
        for worker in engine._workers:
            enqueue = worker.enqueue

            def watched(slot, enqueue=enqueue):
                read.append(sum(copy.source.numel() for copy in slot.weights if copy.on_disk))
                enqueue(slot)

            worker.enqueue = watched
        assert allocated[-4:] == [largest] * 4  # before any boundary

    start = load(checkpoint("qwen3"), torch.float32, LORA)
    layouts = [layer.layout for layer in start.store.layers]
    largest = worker_sizes(layouts, plan, 0, torch.float32, 0).weight_bytes
    settings: dict[str, Any] = {
        "lora": LORA,
        "steps": 1,
        "make_device": Device,
        "before_run": watch,
        "frozen_in": tmp_path,
    }
    outcome = run_engine(checkpoint("qwen3"), plan, 2, **settings)
    first_trained = next(layout.layer for layout in layouts if layout.grad_elements)
    round_bytes = frozen_bytes_up(layouts, plan, first_trained)
    assert sum(read[: 2 * 5]) == 2 * round_bytes > 0  # before the evaluation two rounds, five slots each
    assert sum(layer.weights.numel() for layer in outcome.store.layers) == sum(x.frozen_start for x in layouts)
    (file,) = frozen_files(tmp_path)
    assert file.stat().st_size == frozen_file_bytes(layouts)


def test_a_second_store_reads_the_file_and_not_the_checkpoint(checkpoint, tmp_path, monkeypatch):
    settings: dict[str, Any] = {"lora": LORA, "steps": 1, "quantize": "nf4", "frozen_in": tmp_path}
    first = run_engine(checkpoint("llama"), PLAN, **settings)
    monkeypatch.setattr("rpft.model.load.plan_reads", None)
    assert run_engine(checkpoint("llama"), PLAN, **settings).differences(first) == []


def test_a_trained_module_is_read_again_and_the_frozen_rest_is_not_written(checkpoint, tmp_path):
    settings: dict[str, Any] = {"lora": WHOLE_HEAD, "steps": 1, "frozen_in": tmp_path}
    first = run_engine(checkpoint("llama"), PLAN, **settings)
    second = run_engine(checkpoint("llama"), PLAN, **settings)
    assert second.differences(first) == []
    with pytest.raises(AssertionError, match="norm"):
        second.store.write("model.norm.weight", second.store.tensor("model.norm.weight"))


@pytest.mark.parametrize("other", ["quantised", "newer checkpoint", "another code"])
def test_a_file_of_other_weights_is_replaced(other, checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("llama")
    run_engine(folder, PLAN, lora=LORA, steps=1, frozen_in=tmp_path)
    (before,) = frozen_files(tmp_path)
    (tmp_path / "frozen-notes.txt").write_text("a person's")
    settings: dict[str, Any] = {}
    if other == "quantised":
        settings = {"quantize": "nf4"}
    elif other == "newer checkpoint":
        weights = folder / "model.safetensors"
        os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    else:
        monkeypatch.setattr(frozen_file, "_CODE", ("layout.py",))
    run_engine(folder, PLAN, lora=LORA, steps=1, frozen_in=tmp_path, **settings)
    (after,) = frozen_files(tmp_path)
    assert after != before
    assert (tmp_path / "frozen-notes.txt").exists()


def test_a_file_that_was_cut_short_is_made_again(checkpoint, tmp_path):
    in_ram = run_engine(checkpoint("llama"), PLAN, lora=LORA, steps=1)
    run_engine(checkpoint("llama"), PLAN, lora=LORA, steps=1, frozen_in=tmp_path)
    (file,) = frozen_files(tmp_path)
    file.rename(file.with_name(file.name + ".partial")).write_bytes(b"half of it")
    again = run_engine(checkpoint("llama"), PLAN, lora=LORA, steps=1, frozen_in=tmp_path)
    assert again.differences(in_ram) == []
    assert frozen_files(tmp_path) == [file]


def test_a_disk_that_cannot_be_read_ends_the_run_with_its_name(checkpoint, tmp_path, monkeypatch):
    def fail(source):
        raise OSError("no such disk")

    monkeypatch.setattr("rpft.engine.read_ahead.read_ahead", fail)
    with pytest.raises(EngineError, match=r"weights from disk: slot 0 .* no such disk"):
        run_engine(checkpoint("llama"), PLAN, lora=LORA, steps=1, frozen_in=tmp_path)


@pytest.mark.parametrize("held", ["the reading", "the upload"])
def test_an_upload_waits_for_its_reading_and_a_reading_for_its_buffer(held, checkpoint, tmp_path, monkeypatch):
    """One side is held back until the other would have run over it, were there no wait."""
    wanted = "weights from disk" if held == "the reading" else "weights up"

    class Late(CpuDevice):
        def allocate_host(self, num_bytes):
            return super().allocate_host(num_bytes).fill_(0x11)  # also the padding of the store, in both runs

    in_ram = run_engine(checkpoint("llama"), PLAN, lora=LORA, steps=1, make_device=Late)

    def hold(engine, optimizer):
        pause = threading.Event()
        for stream in engine.streams:
            if stream.name.endswith(wanted):
                stream._pause = lambda: pause.wait(0.02)

    settings: dict[str, Any] = {
        "lora": LORA,
        "steps": 1,
        "frozen_in": tmp_path,
        "before_run": hold,
        "make_device": Late,
    }
    assert run_engine(checkpoint("llama"), PLAN, **settings).differences(in_ram) == []


def test_a_host_buffer_that_cannot_be_had_leaves_no_thread_behind():
    class Device(CpuDevice):
        def allocate_host(self, num_bytes):
            raise MemoryError("no room")

    before = threading.active_count()
    sizes = WorkerSizes(64, 16, 64, torch.float32, 0, 0)
    functions: Any = None
    with pytest.raises(MemoryError, match="no room"):
        Worker(Device(0), functions, [], 0, sizes, 0, {}, Failure(), Delays(None), frozen_on_disk=True)
    assert threading.active_count() == before
