"""On CUDA frozen weights that are read from the disk change no bit, and go up from page-locked memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.engine.trace import TASK
from rpft.engine.tracer import Tracer
from rpft.model.adapters import LoraSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer")
LORA = LoraSettings(4, 8.0, 0.1, "all-linear")


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("resident", [(), (1, 3)], ids=str)
def test_the_numbers_are_those_of_ram(resident, quantize, make_device, checkpoint, tmp_path):
    settings = {"lora": LORA, "quantize": quantize, "make_device": make_device, "dtype": torch.bfloat16}
    plan = replace(PLAN, resident=resident)
    in_ram = run_engine(checkpoint("llama"), plan, **settings)
    for workers, seed in ((1, None), (2, 1)):
        on_disk = run_engine(checkpoint("llama"), plan, workers, frozen_in=tmp_path, delays_seed=seed, **settings)
        assert on_disk.differences(in_ram) == []


@pytest.mark.parametrize("purpose", ["weights up", "compute"])
def test_a_late_stream_of_the_device_is_waited_for(purpose, make_late, make_device, checkpoint, tmp_path):
    """What the host reads next must not run over what a transfer has yet to take."""
    in_ram = run_engine(checkpoint("llama"), PLAN, lora=LORA, make_device=make_device)
    late = run_engine(checkpoint("llama"), PLAN, lora=LORA, make_device=make_late(purpose, 1), frozen_in=tmp_path)
    assert late.differences(in_ram) == []


def test_what_is_read_goes_up_from_page_locked_memory(make_device, checkpoint, tmp_path):
    seen = []

    def watch(engine, optimizer):
        for worker in engine._workers:
            seen.extend(buffer.is_pinned() for buffer in worker._read_ahead._ring._buffers)

    settings = {"lora": LORA, "make_device": make_device, "before_run": watch}
    run_engine(checkpoint("llama"), PLAN, frozen_in=tmp_path, **settings)
    assert seen == [True, True]


def test_no_copy_of_a_worker_comes_from_a_files_mapping(make_device, checkpoint, tmp_path):
    """A trace of such a run: what is read is read by the host's stream, and every upload is a transfer."""
    tracers = []

    def watch(engine, optimizer):
        tracers.append(Tracer(engine.streams))
        tracers[0].start()

    settings = {"lora": LORA, "make_device": make_device, "before_run": watch}
    outcome = run_engine(checkpoint("llama"), PLAN, frozen_in=tmp_path, **settings)
    tasks = [span for span in tracers[0].stop().spans if span.nature == TASK]
    frozen = sum(layer.frozen.numel() for layer in outcome.store.layers)
    uploaded = sum(span.copied_bytes for span in tasks if span.stream == "weights up")
    assert uploaded > 3 * 2 * frozen  # three steps of two rounds
    assert any(span.stream == "weights from disk" for span in tasks)
