"""Whatever is copied of a save and whenever, its files hold the state of the step that was armed, bit for bit."""

import random
import threading
from pathlib import Path

import psutil
import pytest
import torch

from rpft import files
from rpft.engine.failure import POLL_SECONDS, Cancelled, Failure
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec, build_layouts
from rpft.train import save_copies, shards, spare_memory
from rpft.train.checkpoint import CheckpointFolder, TrainState
from rpft.train.save_copies import Ring, copies_bytes
from rpft.train.saver import Saver
from rpft.train.spare_memory import SpareMemory

EVERYTHING = 1 << 30
STEP = 4
HANG_SECONDS = 60


def test_places_in_a_ring_never_overlap_and_lie_below_its_capacity_even_while_that_changes():
    rng = random.Random(0)
    wrapped = 0
    for _ in range(200):
        ring, taken, capacity = Ring(), [], rng.randint(0, 4000)
        for _ in range(60):
            if rng.random() < 0.05:
                capacity = rng.randint(0, 4000)
            if taken and rng.random() < 0.45:
                ring.release()
                taken.pop(0)
                continue
            size = rng.randint(1, 900)
            start = ring.reserve(size, capacity)
            if start is None:
                assert taken or size > capacity // 64 * 64, "an empty ring has all its room"
                continue
            assert 0 <= start <= start + size <= capacity
            assert start % 64 == 0
            assert all(start + size <= a or b <= start for a, b in taken)
            wrapped += bool(taken) and start < taken[-1][0]
            taken.append((start, start + size))
    assert wrapped > 100


# -- a store, a saver, and a disk that writes when it is told to --------------------------------------------


def random_store(rng, kind):
    """Layers of random sizes, some with nothing trained, filled with random bits."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    layers = []
    for layer in range(rng.randint(1, 5)):
        specs = []
        for number in range(rng.randint(1, 4)):
            shape = rng.choice([(rng.randint(1, 3000),), (rng.randint(1, 60), rng.randint(1, 60))])
            name = f"{layer}.{number}"
            specs.append(TensorSpec(name, shape, dtype, rng.random() < 0.8, len(shape) > 1, name))
        layers.append(specs)
    store = HostStore(
        build_layouts(layers, {}),
        two_copies=kind == "delayed",
        whole_masters=kind == "whole masters",
        state_format={"bf16 moments": "bf16", "8bit moments": "8bit"}.get(kind, "fp32"),
    )
    for layer in store.layers:
        scribble(layer, rng)
    return store


def scribble(layer, rng):
    """Random bits, NaNs among them, into all that an update may write."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    trained = layer.layout.num_trained * layer.dtype.itemsize
    for buffer in (layer.weights[:trained], layer.second, layer.master.view(torch.uint8), layer.state):
        buffer.copy_(torch.randint(256, buffer.shape, dtype=torch.uint8, generator=generator))
    if layer.second.numel():
        layer.latest = 1 - layer.latest


def update(saver, store, step, rng, before=lambda layer: None):
    """What an optimizer does to all layers."""
    for number in store.update_order:
        layer = store.layers[number]
        if layer.layout.num_trained:
            before(number)
            saver.before_update(step, number)
            scribble(layer, rng)


class Disk:
    """Writes to the files of layers wait until they are let through."""

    def __init__(self, monkeypatch):
        self.came = threading.Semaphore(0)
        """Released at each write, before it waits."""
        self._passes, self._open = threading.Semaphore(0), False
        write = files.write

        def waiting(file, data):
            if Path(file.name).name.startswith("layer-") and not self._open:
                self.came.release()
                assert self._passes.acquire(timeout=HANG_SECONDS)
            write(file, data)

        monkeypatch.setattr(files, "write", waiting)

    def let_through(self, count):
        if count:
            self._passes.release(count)

    def open(self):
        self._open = True
        self.let_through(1)


class Watched(Failure):
    """Told each time the optimizer is about to wait for the disk."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def cancel_if_lost(self):
        self._told()
        super().cancel_if_lost()


def no_wait():
    raise AssertionError("the update waited for the disk")


def saver_for(store, folder, told=no_wait, region=0):
    """A saver with at most ``region`` bytes for copies. ``told``: see ``Watched``."""
    lagging = any(layer.second.numel() for layer in store.layers)
    checkpoints = CheckpointFolder(folder, keep_last=9, keep_best=False)
    settings = {"lagging": lagging, "may_make_room": False, "before_commit": lambda: None}
    saver = Saver(checkpoints, store, Watched(told), **settings)
    needed = copies_bytes([layer.layout for layer in store.layers], lagging, store.state_format)
    saver.take_memory(min(region, needed), 0)
    saver._memory.wait()
    return saver


def state(step=STEP):
    return TrainState(step, step, 0, 0, None, None, {}, {})


def saved(folder, step=STEP):
    path = CheckpointFolder(folder, keep_last=9, keep_best=False).folder_of(step)
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def as_it_stands(store, folder, step=STEP):
    """The files of a save that nothing disturbs."""
    saver = saver_for(store, folder)
    saver.arm(step)
    saver.start(state(step))
    saver.wait()
    assert saver.take_reports()[0].error is None
    return saved(folder, step)


def save_in_trouble(kind, seed, folder, monkeypatch):
    """(bytes copied, room for them, waits for the disk) of a save that must hold the armed step."""
    rng, waits = random.Random(seed), []
    monkeypatch.setattr(shards, "_CHUNK_BYTES", rng.choice([256, 2048, 1 << 14]))
    monkeypatch.setattr(save_copies, "_COPIED_AT_ONCE", rng.choice([1, 5000, 1 << 28]))
    store = random_store(rng, kind)
    expected = as_it_stands(store, folder / "expected")
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        # An update may come to a layer before the main thread has come to begin the save.
        begin = [lambda: saver.start(state())]

        def told():
            waits.append(seed)
            if begin:
                begin.pop()()
            disk.let_through(1)

        region = rng.choice([0, rng.randint(0, 3000), rng.randint(0, 60_000), EVERYTHING])
        saver = saver_for(store, folder / "saved", told, region)
        saver.arm(STEP)
        if rng.random() < 0.7:
            begin.pop()()

        def before(step):
            disk.let_through(rng.choice([0, 0, 1, 5, 40]))
            for _ in range(rng.choice([0, 0, 1, 3])):
                saver.copy_ahead(step)

        for step in (STEP + 1, STEP + 2):
            update(saver, store, step, rng, lambda layer, step=step: before(step))
        if begin:
            begin.pop()()
        disk.open()
        saver.wait()
    (report,) = saver.take_reports()
    assert report.error is None
    assert saved(folder / "saved") == expected, seed
    assert region or not report.copied_bytes
    saver.close()
    return report.copied_bytes, region, len(waits)


@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "whole masters", "delayed", "bf16 moments", "8bit moments"]
)
def test_files_hold_the_armed_step_whatever_room_there_is_and_however_fast_the_disk(kind, tmp_path, monkeypatch):
    found = [save_in_trouble(kind, seed, tmp_path / str(seed), monkeypatch) for seed in range(12)]
    assert any(copied > 0 and waits > 0 for copied, _, waits in found)
    assert any(copied > 0 and waits == 0 for copied, _, waits in found)
    assert any(copied > 2 * room > 0 for copied, room, _ in found), "room is used again"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "delayed", "8bit moments"])
def test_with_room_for_all_of_it_no_update_waits_for_a_disk_that_writes_nothing(kind, tmp_path, monkeypatch):
    rng = random.Random(3)
    store = random_store(rng, kind)
    expected = as_it_stands(store, tmp_path / "expected")
    disk = Disk(monkeypatch)
    saver = saver_for(store, tmp_path / "copied", region=EVERYTHING)  # that raises if an update is to wait
    saver.arm(STEP)
    saver.start(state())
    assert disk.came.acquire(timeout=HANG_SECONDS)
    for step in (STEP + 1, STEP + 2, STEP + 3):
        update(saver, store, step, rng)
    disk.open()
    saver.wait()
    (report,) = saver.take_reports()
    assert saved(tmp_path / "copied") == expected
    layouts = [layer.layout for layer in store.layers]
    needed = copies_bytes(layouts, kind == "delayed", store.state_format)
    assert needed - 64 * 200 <= report.copied_bytes <= needed


@pytest.mark.parametrize("kind", ["bfloat16", "delayed"])
def test_what_was_copied_while_gradients_were_awaited_no_update_copies(kind, tmp_path, monkeypatch):
    rng = random.Random(4)
    monkeypatch.setattr(save_copies, "_COPIED_AT_ONCE", 5000)
    store = random_store(rng, kind)
    expected = as_it_stands(store, tmp_path / "expected")
    disk = Disk(monkeypatch)
    saver = saver_for(store, tmp_path / "copied", region=EVERYTHING)
    assert not saver.copy_ahead(STEP)
    saver.arm(STEP)
    assert not saver.copy_ahead(STEP), "its own updates are not applied yet"
    assert saver.copy_ahead(STEP + 1)
    saver.start(state())
    assert disk.came.acquire(timeout=HANG_SECONDS)
    while saver.copy_ahead(STEP + 1):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(save_copies, "_copied", None)
        update(saver, store, STEP + 1, rng)
    disk.open()
    saver.wait()
    assert saved(tmp_path / "copied") == expected
    assert not saver.copy_ahead(STEP + 1)


def test_an_update_waits_for_the_piece_of_its_layer_that_is_being_written_and_copies_the_rest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 400)
    specs = [[TensorSpec(str(n), (100,), torch.float32, True, True, str(n))] for n in range(2)]
    store = HostStore(build_layouts(specs, {}))
    disk, waited = Disk(monkeypatch), threading.Event()
    saver = saver_for(store, tmp_path, waited.set, EVERYTHING)
    saver.arm(STEP)
    saver.start(state())
    disk.let_through(1)  # the head of the file
    for _ in range(2):
        assert disk.came.acquire(timeout=HANG_SECONDS)  # the first piece, from the store
    optimizer = threading.Thread(target=lambda: saver.before_update(STEP + 1, 0), daemon=True)
    optimizer.start()
    assert waited.wait(HANG_SECONDS)
    assert optimizer.is_alive()
    disk.let_through(1)
    optimizer.join(HANG_SECONDS)
    assert not optimizer.is_alive()
    disk.open()
    saver.wait()
    assert saver.take_reports()[0].copied_bytes == 2 * 400  # both moments of layer 0


def held_copies(monkeypatch):
    """(set when a copy is begun, to be set for it to go on)."""
    copying, go_on, copied = threading.Event(), threading.Event(), save_copies._copied

    def slowly(*given):
        copying.set()
        assert go_on.wait(HANG_SECONDS)
        return copied(*given)

    monkeypatch.setattr(save_copies, "_copied", slowly)
    return copying, go_on


def test_a_piece_that_is_being_copied_is_written_from_its_copy(tmp_path, monkeypatch):
    store = HostStore(build_layouts([[TensorSpec("w", (100,), torch.float32, True, True, "w")]], {}))
    expected = as_it_stands(store, tmp_path / "expected")
    copying, go_on = held_copies(monkeypatch)
    disk = Disk(monkeypatch)
    saver = saver_for(store, tmp_path / "saved", region=EVERYTHING)
    saver.arm(STEP)
    optimizer = threading.Thread(target=lambda: update(saver, store, STEP + 1, random.Random(0)), daemon=True)
    optimizer.start()
    assert copying.wait(HANG_SECONDS)
    saver.start(state())
    disk.let_through(1)
    assert disk.came.acquire(timeout=HANG_SECONDS)  # the head of the file
    assert not disk.came.acquire(timeout=0.3), "the first piece is written although it is not there yet"
    go_on.set()
    optimizer.join(HANG_SECONDS)
    disk.open()
    saver.wait()
    assert saved(tmp_path / "saved") == expected


def test_a_save_that_fails_lets_updates_go_and_leaves_the_room_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 2048)
    rng = random.Random(5)
    store = random_store(rng, "bfloat16")
    write = files.write
    for step in range(1, 9):
        broken = step % 2 == 1
        number = iter(range(100))

        def failing(file, data, broken=broken, number=number, step=step):
            if broken and "layer-" in file.name and next(number) == step:
                raise OSError(28, "No space left on device")
            write(file, data)

        if step == 1:
            told = threading.Event()
            saver = saver_for(store, tmp_path / "saved", told.set, 5000)
        monkeypatch.setattr(files, "write", write)
        expected = as_it_stands(store, tmp_path / f"{step} expected", step)
        monkeypatch.setattr(files, "write", failing)
        saver.arm(step)
        saver.start(state(step))
        update(saver, store, step + 1, rng)
        saver.wait()
        (report,) = saver.take_reports()
        assert (report.error is not None) == broken
        assert saved(tmp_path / "saved", step) == ({} if broken else expected)


@pytest.mark.parametrize("ends", [True, False], ids=["a copy that ends", "a copy that never ends"])
def test_a_run_that_fails_while_a_piece_is_copied_keeps_its_save_and_does_not_wait_for_ever(
    ends, tmp_path, monkeypatch
):
    monkeypatch.setattr(save_copies, "_PATIENCE_SECONDS", HANG_SECONDS if ends else 0.05)
    rng = random.Random(2)
    store = random_store(rng, "float32")
    expected = as_it_stands(store, tmp_path / "expected")
    copying, go_on = held_copies(monkeypatch)
    saver = saver_for(store, tmp_path / "saved", region=EVERYTHING)
    saver.arm(STEP)
    optimizer = threading.Thread(target=lambda: saver.copy_ahead(STEP + 1), daemon=True)
    optimizer.start()
    assert copying.wait(HANG_SECONDS)
    saver.start(state())
    saver._failure.set(ValueError("the run is over"))
    if ends:
        threading.Timer(3 * POLL_SECONDS, go_on.set).start()
    saver.wait()
    assert go_on.is_set() == ends
    go_on.set()
    optimizer.join(HANG_SECONDS)
    (report,) = saver.take_reports()
    assert saved(tmp_path / "saved") == (expected if ends else {})
    assert ends == (report.error is None)


def test_an_update_that_waits_for_room_ends_with_the_run(tmp_path, monkeypatch):
    rng = random.Random(1)
    store = random_store(rng, "float32")
    Disk(monkeypatch)
    saver = saver_for(store, tmp_path, lambda: saver._failure.set(ValueError("the run is over")))
    saver.arm(STEP)
    with pytest.raises(Cancelled):
        update(saver, store, STEP + 1, rng)


# -- the memory for copies ---------------------------------------------------------------------------------


def test_memory_is_taken_as_far_as_it_leaves_others_enough_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setattr(spare_memory, "_STEP_BYTES", 1 << 20)
    left = iter([9 << 20, 8 << 20, 7 << 20])
    memory = SpareMemory(threading.Condition(), lambda: next(left))
    memory.take(5 << 20, 7 << 20)
    memory.wait()
    assert memory.ready_bytes == 2 << 20
    assert "of 5 MiB for copies while a checkpoint is written 2 MiB are taken" in caplog.text
    memory.close()
    assert memory.ready_bytes == 0


def test_what_is_given_back_is_the_systems_again_and_the_rest_stays():
    memory = SpareMemory(threading.Condition())
    before = psutil.Process().memory_info().rss
    memory.take(96 << 20, 0)
    memory.wait()
    place = memory.place(0, 1 << 20).fill_(7)
    taken = psutil.Process().memory_info().rss
    assert taken - before >= 90 << 20
    memory.limit(16 << 20)
    memory.trim()
    assert memory.ready_bytes == 16 << 20
    assert taken - psutil.Process().memory_info().rss >= 70 << 20
    assert bool((place == 7).all())
    memory.take(64 << 20, 0)
    memory.wait()
    assert memory.ready_bytes == 64 << 20


@pytest.mark.parametrize("begun", [True, False])
def test_a_limit_keeps_what_a_save_still_has_to_write(begun, tmp_path, monkeypatch):
    """As when a smaller plan, which takes more RAM, begins while a checkpoint is written."""
    rng = random.Random(7)
    store = random_store(rng, "bfloat16")
    expected = as_it_stands(store, tmp_path / "expected")
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        saver = saver_for(store, tmp_path / "saved", region=EVERYTHING)
        saver.arm(STEP)
        if begun:
            saver.start(state())
            assert disk.came.acquire(timeout=HANG_SECONDS)
        update(saver, store, STEP + 1, rng)
        disk.open()
        saver.limit_memory(0)
        assert (saver._memory._touched == 0) == begun, "before the next plan takes RAM, if that can be"
        if not begun:
            saver.start(state())
        saver.wait()
    assert saved(tmp_path / "saved") == expected
    assert saver._memory._touched == 0, "the memory is given back at last"
