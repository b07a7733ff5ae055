"""A checkpoint is written while training goes on, and holds the state of its own step, bit for bit."""

import hashlib
import tempfile
import threading

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import unbroken_runs

from rpft import files
from rpft.engine.failure import Failure
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec, build_layouts
from rpft.plan.bill import RESULT_EXTRAS_BYTES
from rpft.train import shards
from rpft.train.checkpoint import CheckpointFolder
from rpft.train.planned import Planned
from rpft.train.saver import Saver
from rpft.train.shards import FileRecord, TensorEntry, file_record, shard_bytes, write_shard

KINDS = {
    "sync": ("llama", {}),
    "bfloat16": ("llama", {"model": {"dtype": "bfloat16"}}),
    "delayed": ("llama", {"optimizer": {"update": "delayed"}}),
    "moments on disk": ("llama", {"optimizer": {"offload": tempfile.gettempdir()}}),
}


@pytest.fixture(scope="module")
def runs(project):
    """runs(kind) -> the project, and its unbroken run, which saves nothing."""
    return unbroken_runs(project, "saver", KINDS, {"max_steps": 6})


def slow_disk(monkeypatch, waits, until, held_layer=2):
    """The file of ``held_layer`` of step 2 is held up until the update of step 3 comes to layer ``until``.

    ``waits``: whether the optimizer waits for the saver, or copies, as it should.
    """
    came = threading.Event()
    before_update, write = Saver.before_update, files.write

    def watched(self, step, layer):
        if (step, layer) == (3, until):
            came.set()
        if waits:
            before_update(self, step, layer)

    def held(file, data):
        if file.name.endswith(f"step-00000002.partial/layer-{held_layer:05d}.safetensors"):
            assert came.wait(60), "training did not go on"
        write(file, data)

    monkeypatch.setattr(Saver, "before_update", watched)
    if not waits:
        monkeypatch.setattr(Saver, "copy_ahead", lambda self, step: False)
    monkeypatch.setattr(files, "write", held)


def save_and_go_on(made, output, unbroken, monkeypatch, *how):
    """Whether a run that goes on from the checkpoint of step 2, written slowly, is the unbroken one."""
    with monkeypatch.context() as patch:
        slow_disk(patch, *how)
        made.train_well(output, "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    folder = made.folder / output / "checkpoints" / "step-00000002"
    ran = made.train(output, "--resume", str(folder))
    if ran.code:  # a layer that changed while it was written is not what its checksum says
        assert "its checksum differs" in ran.err
        return False
    resumed = made.outcome(output)
    return resumed.numbers == unbroken.numbers and resumed.result == unbroken.result


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_on_a_slow_disk_holds_its_own_step_and_changes_nothing(kind, runs, monkeypatch):
    made, unbroken = runs(kind)
    assert save_and_go_on(made, "slow", unbroken, monkeypatch, True, 2)


@pytest.mark.parametrize(("kind", "first", "last"), [("bfloat16", 0, 5), ("delayed", 5, 0)])
def test_updates_go_on_to_the_last_layer_while_the_disk_has_not_written_the_first(
    kind, first, last, runs, monkeypatch
):
    made, unbroken = runs(kind)
    assert save_and_go_on(made, "copied", unbroken, monkeypatch, True, last, first)
    assert "MiB of them from copies" in (made.folder / "copied" / "run.log").read_text()


@pytest.mark.parametrize("kind", ["sync", "delayed"])
def test_without_room_for_copies_updates_wait_for_the_disk(kind, runs, monkeypatch):
    made, unbroken = runs(kind)
    monkeypatch.setattr(Planned, "copies_bytes", 0)
    assert save_and_go_on(made, "no room", unbroken, monkeypatch, True, 2)
    assert "0 KiB of them from copies" in (made.folder / "no room" / "run.log").read_text()


@pytest.mark.parametrize("kind", ["sync", "delayed", "moments on disk"])
def test_it_would_hold_later_steps_if_the_optimizer_did_not_wait(kind, runs, monkeypatch):
    made, unbroken = runs(kind)
    assert not save_and_go_on(made, "no wait", unbroken, monkeypatch, False, 3)


def test_saving_at_every_step_changes_no_number_in_any_mode(runs):
    for kind in KINDS:
        made, unbroken = runs(kind)
        saved = made.train_well("every", "checkpoint.every_steps=1", "engine.inject_delays=3", "engine.workers=2")
        assert (saved.numbers, saved.result) == (unbroken.numbers, unbroken.result)
        assert saved.checkpoints == ["step-00000005", "step-00000006"]


def test_a_shard_is_what_safetensors_reads_with_its_size_and_checksum(tmp_path):
    tensors = {
        "a": torch.arange(10, dtype=torch.float32).view(2, 5),
        "b": torch.randn(3, 1, 7).bfloat16(),
        "c": torch.zeros(0),
        "d": torch.tensor(3.0),
    }
    entries = [
        TensorEntry(name, t.dtype, tuple(t.shape), lambda first, stop, t=t: [t.flatten()[first:stop]])
        for name, t in tensors.items()
    ]
    path = tmp_path / "x.safetensors"
    record = write_shard(path, entries, lambda count: None)
    content = path.read_bytes()
    assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest()) == file_record(path)
    assert shard_bytes(entries) == len(content)
    read = load_file(path)
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_large_tensor_is_never_in_memory_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 1000)
    asked = []

    def read(first, stop):
        asked.append((first, stop))
        return [torch.arange(first, stop, dtype=torch.float32)]

    write_shard(tmp_path / "x", [TensorEntry("a", torch.float32, (777,), read)], lambda count: None)
    assert asked == [(0, 250), (250, 500), (500, 750), (750, 777)]
    assert torch.equal(load_file(tmp_path / "x")["a"], torch.arange(777, dtype=torch.float32))


def test_an_update_that_was_held_up_goes_on_when_the_next_save_needs_it(tmp_path):
    """A save may end and the next be asked for before the optimizer's thread has looked again."""
    specs = [TensorSpec("w", (4, 4), torch.float32, True, True, "w")]
    store = HostStore(build_layouts([specs], {}))
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=False)
    saver = Saver(folder, store, Failure(), lagging=False, may_make_room=False, before_commit=lambda: None)
    saver.arm(2)
    update = threading.Thread(target=lambda: saver.before_update(3, 0), daemon=True)
    update.start()
    update.join(0.3)
    assert update.is_alive()
    saver.arm(3)
    update.join(5.0)
    assert not update.is_alive()


# -- room on the disk --------------------------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch, runs):
    """From the third save on, the disk has room for a checkpoint only if one is removed."""
    made, _ = runs("sync")
    free = files.free_bytes

    def free_bytes(path):
        there = list(path.glob("step-????????")) if path.name == "checkpoints" else []
        return 10 if len(there) >= 2 else free(path)

    monkeypatch.setattr(files, "free_bytes", free_bytes)
    return made


def test_without_make_room_a_full_disk_is_said_and_the_run_goes_on_to_the_third_time(little_room):
    ran = little_room.train("kept", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    assert ran.code == 5
    assert ran.out.count("could not be saved") == 2
    assert "are free on the disk of" in ran.err
    assert little_room.outcome("kept").checkpoints == ["step-00000001", "step-00000002"]


def test_with_make_room_the_oldest_checkpoint_goes_and_that_is_said(little_room):
    words = ("checkpoint.every_steps=1", "checkpoint.keep_last=9", "checkpoint.make_room=true")
    ran = little_room.train("removed", *words)
    assert ran.code == 0, ran.err
    assert ran.out.count("to make room") == 4
    assert little_room.outcome("removed").checkpoints == ["step-00000005", "step-00000006"]


def test_a_disk_too_small_for_the_checkpoints_is_refused_at_the_start_with_the_settings_that_help(
    runs, monkeypatch
):
    made, _ = runs("sync")
    monkeypatch.setattr(files, "free_bytes", lambda path: RESULT_EXTRAS_BYTES + (8 << 20))
    words = ("checkpoint.every_steps=1", "checkpoint.keep_last=5")
    ran = made.train("too small", *words)
    assert ran.code == 2
    assert "6 checkpoint(s) at once of 2 MiB each" in ran.err
    assert "checkpoint.keep_last=1" in ran.err
    assert not (made.folder / "too small").exists()
    made.train_well("small enough", *words, "checkpoint.make_room=true")
