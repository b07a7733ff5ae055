"""Moments in a file, read ahead of updates and written behind them, change no bit of a run with them in RAM."""

import errno
import random
import threading
import time
from typing import Any

import pytest
import torch
from support.engines import plan_of, random_plan, run_engine
from support.models import load

from rpft import files
from rpft.engine.failure import EngineError
from rpft.engine.trace import DISK, HOST, TASK, WAIT
from rpft.engine.tracer import Tracer
from rpft.model import moments_file
from rpft.model.adapters import LoraSettings
from rpft.model.moments import moments_bytes, stored_parts
from rpft.model.moments_file import MomentsFile, moments_file_bytes, moments_pieces, window_bytes
from rpft.model.pages import zeroed_pages
from rpft.train.faults import exit_code

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer")
LORA = LoraSettings(4, 8.0, 0.1, ["q_proj", "down_proj"])

pytestmark = pytest.mark.usefixtures("functions_made_once")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "full, tied, bfloat16": ("qwen3", {"dtype": torch.bfloat16}),
    "full, tied, bfloat16, delayed": ("qwen3", {"dtype": torch.bfloat16, "update_lag": 1}),
    "bf16 moments": ("qwen3", {"dtype": torch.bfloat16, "state": "bf16"}),
    "8bit moments, delayed": ("qwen3", {"dtype": torch.bfloat16, "state": "8bit", "update_lag": 1}),
    "LoRA": ("llama", {"lora": LORA}),
    "LoRA, delayed": ("llama", {"lora": LORA, "update_lag": 1}),
}

SLOW = {"full", "LoRA, delayed"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Layers of the tiny models have several."""
    monkeypatch.setattr(moments_file, "PIECE_PARAMETERS", 4096)


def check_random_run(name, seed, checkpoint, folder):
    family, settings = CASES[name]
    in_ram = run_engine(checkpoint(family), PLAN, **settings, steps=2)
    rng = random.Random(f"{name} {seed}")
    plan, workers = random_plan(rng, 6, rng.randint(1, 4)), rng.choice([1, 2, 3])
    print(f"{workers} workers, {plan}")
    settings = {**settings, "steps": 2, "moments_in": folder, "delays_seed": seed}
    on_disk = run_engine(checkpoint(family), plan, workers, **settings)
    assert on_disk.store.moments_file is not None
    assert on_disk.differences(in_ram) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_the_numbers_are_those_of_ram_for_any_plan_workers_and_delays(name, checkpoint, tmp_path):
    check_random_run(name, 0, checkpoint, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", CASES)
def test_many_more_plans_and_timings_give_the_same_bits(name, seed, checkpoint, tmp_path):
    check_random_run(name, seed, checkpoint, tmp_path)


@pytest.mark.parametrize("pieces", [pytest.param(1 << 24, marks=pytest.mark.slow), 256])
def test_one_piece_a_layer_or_hundreds_are_the_same(pieces, checkpoint, tmp_path, monkeypatch):
    in_ram = run_engine(checkpoint("llama"), PLAN, lora=LORA)
    monkeypatch.setattr(moments_file, "PIECE_PARAMETERS", pieces)
    on_disk = run_engine(checkpoint("llama"), PLAN, 2, lora=LORA, moments_in=tmp_path)
    assert on_disk.differences(in_ram) == []


def test_through_the_cache_they_are_the_same(checkpoint, tmp_path, monkeypatch, caplog):
    whole = moments_file.ScratchFile
    monkeypatch.setattr(moments_file, "ScratchFile", lambda *arguments: whole(*arguments, direct=False))
    settings: dict[str, Any] = {"lora": LORA, "steps": 2}
    in_ram = run_engine(checkpoint("qwen3"), PLAN, **settings)
    assert run_engine(checkpoint("qwen3"), PLAN, **settings, moments_in=tmp_path).differences(in_ram) == []
    assert "has no direct reads and writes" in caplog.text


def test_a_skipped_step_leaves_what_was_read_ahead_for_the_next(checkpoint, tmp_path):
    """The loss of step 2 is made not finite where the optimizer takes it."""

    def spoil(engine, optimizer):
        apply = optimizer._apply

        def spoiled(update):
            if update.ticket.step == 2:
                update.ticket.losses.total = lambda: float("nan")
            return apply(update)

        optimizer._apply = spoiled

    runs = [
        run_engine(checkpoint("llama"), PLAN, steps=4, before_run=spoil, moments_in=folder)
        for folder in (None, tmp_path)
    ]
    assert [result.skipped for result in runs[1].results] == [False, True, False, False]
    assert runs[1].numbers[2:] == runs[0].numbers[2:]
    assert runs[1].store.layers[2].exp_avg.any()
    assert torch.equal(runs[1].store.layers[2].exp_avg, runs[0].store.layers[2].exp_avg)


@pytest.mark.parametrize("held", ["optimizer from disk", "optimizer to disk", "optimizer"])
def test_none_of_the_three_threads_runs_over_another(held, checkpoint, tmp_path, monkeypatch):
    """One is held up before each of its tasks until the others would have run over it, were there no wait."""
    settings: dict[str, Any] = {"steps": 2, "lora": LORA}
    in_ram = run_engine(checkpoint("qwen3"), PLAN, **settings)

    def hold(engine, optimizer):
        pause = threading.Event()
        for stream in optimizer.streams:
            if stream.name == held:
                stream._pause = lambda: pause.wait(0.003)

    monkeypatch.setattr(moments_file, "zeroed_pages", lambda num_bytes: zeroed_pages(num_bytes).fill_(0xFF))
    on_disk = run_engine(checkpoint("qwen3"), PLAN, **settings, moments_in=tmp_path, before_run=hold)
    assert on_disk.differences(in_ram) == []


def test_each_byte_is_read_and_written_once_a_step_and_all_is_kept_when_a_step_is_over(
    checkpoint, tmp_path, monkeypatch
):
    read, written, over = [], [], []
    load_piece, keep_piece = MomentsFile.load, MomentsFile.keep

    def load_noted(self, piece, buffer):
        read.append(piece)
        load_piece(self, piece, buffer)

    def keep_noted(self, piece, buffer):
        time.sleep(0.002)
        keep_piece(self, piece, buffer)
        written.append(piece)

    def watch(engine, optimizer):
        complete = optimizer._complete

        def noted(update):
            complete(update)
            over.append(len(written))

        optimizer._complete = noted

    monkeypatch.setattr(MomentsFile, "load", load_noted)
    monkeypatch.setattr(MomentsFile, "keep", keep_noted)
    outcome = run_engine(checkpoint("llama"), PLAN, steps=3, moments_in=tmp_path, before_run=watch)
    file = outcome.store.moments_file
    assert file is not None
    assert written == 3 * file.pieces
    assert over == [len(file.pieces) * step for step in (1, 2, 3)]
    assert read == [*3 * file.pieces, *file.pieces[: len(file.window)]]


def test_the_bill_of_file_and_window_is_what_they_take(checkpoint, tmp_path):
    layouts = [layer.layout for layer in load(checkpoint("qwen3"), torch.bfloat16).store.layers]
    pieces = moments_pieces(layouts, "fp32")
    file = MomentsFile(tmp_path, layouts, "fp32")
    assert sum(buffer.numel() for buffer in file.window) == window_bytes(pieces)
    assert file._file.num_bytes == moments_file_bytes(pieces)
    state = moments_bytes("fp32", sum(layout.num_trained for layout in layouts))
    assert state <= moments_file_bytes(pieces) < state + 4096 * len(pieces)
    assert window_bytes(pieces) == 4 * 4096 * 8 < state
    for layout in layouts:
        ends = [(piece.start, piece.stop) for piece in pieces if piece.layer == layout.layer]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == layout.num_trained


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "8bit"])
def test_any_elements_are_read_as_they_were_written_across_pieces(state_format, checkpoint, tmp_path):
    layouts = [layer.layout for layer in load(checkpoint("llama"), torch.bfloat16).store.layers]
    file, rng = MomentsFile(tmp_path, layouts, state_format), random.Random(0)
    known = {}
    for layout in layouts:
        whole = torch.empty(moments_bytes(state_format, layout.num_trained), dtype=torch.uint8)
        for part in stored_parts(state_format):
            field = getattr(moments_file.moments_in(whole, state_format, layout.num_trained), part.name)
            values = torch.randint(200, field.shape, generator=torch.Generator().manual_seed(len(known))).to(
                field.dtype
            )
            known[layout.layer, part.name] = values
            cut = rng.randrange(len(values))
            file.write(layout.layer, part.name, cut, values[cut:])
            file.write(layout.layer, part.name, 0, values[:cut])
    for (layer, name), values in known.items():
        for _ in range(3):
            first, stop = sorted(rng.sample(range(len(values) + 1), 2))
            assert torch.equal(file.read(layer, name, first, stop), values[first:stop])
    for piece in file.pieces:  # and so the update sees them
        file.load(piece, file.window[0])
        moments = file.moments_in(piece, file.window[0])
        assert torch.equal(moments.exp_avg, known[piece.layer, "exp_avg"][piece.part])


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_broken_disk_ends_the_run_and_says_what_it_was_at(operation, checkpoint, tmp_path, monkeypatch):
    whole, calls = getattr(files, f"{operation}_at"), iter(range(1 << 20))

    def broken(descriptor, data, offset):
        if next(calls) > 40:
            raise OSError(errno.EIO, "Input/output error")
        whole(descriptor, data, offset)

    monkeypatch.setattr(files, f"{operation}_at", broken)
    way = "optimizer from disk" if operation == "read" else "optimizer to disk"
    with pytest.raises(EngineError, match=rf"{way}: moments of layer \d .* Input/output error") as caught:
        run_engine(checkpoint("llama"), PLAN, moments_in=tmp_path)
    assert exit_code(caught.value) == 5
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("optimizer")]


def test_a_trace_has_every_transfer_with_its_bytes_and_what_the_optimizer_waited_for(
    checkpoint, tmp_path, monkeypatch
):
    tracers = []

    def trace_it(engine, optimizer):
        tracers.append(Tracer([*engine.streams, *optimizer.streams]))
        tracers[0].start()

    keep_piece = MomentsFile.keep
    monkeypatch.setattr(MomentsFile, "keep", lambda *arguments: time.sleep(0.003) or keep_piece(*arguments))
    outcome = run_engine(checkpoint("llama"), PLAN, 2, steps=2, moments_in=tmp_path, before_run=trace_it)
    trace, file = tracers[0].stop(), outcome.store.moments_file
    assert file is not None
    of = {
        stream: sum(s.copied_bytes for s in trace.spans if (s.worker, s.stream, s.nature) == (HOST, stream, TASK))
        for stream in ("optimizer from disk", "optimizer to disk")
    }
    assert of["optimizer to disk"] == 2 * file.num_bytes
    assert of["optimizer from disk"] >= 2 * file.num_bytes
    waits = [s for s in trace.spans if s.stream == "optimizer" and s.nature == WAIT and s.cause == DISK]
    assert sum(s.seconds for s in waits) > 0.1  # of 2 x 30 pieces of 3 ms
