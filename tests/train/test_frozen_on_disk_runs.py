"""`rpft train` and `rpft plan` with frozen weights on the disk: numbers, resume, bills, refusals."""

import json
import os

import pytest
from support.engines import plan_of
from support.recipes import crash_at, run_rpft

from rpft import files
from rpft.model.frozen_file import frozen_file_bytes, frozen_files
from rpft.plan.disk_rate import disk_rate
from rpft.recipe.load import load_recipe
from rpft.train import tries
from rpft.train.prepare import prepare

NF4, MMAP, AUTO = "model.quantize=nf4", "engine.host_store=mmap", "engine.host_store=auto"
EACH_ALONE = plan_of([(i, i) for i in range(5)], [(5, 5), *((i, i) for i in (4, 3, 2, 1, 0))], 2, "layer")


@pytest.fixture(scope="module", autouse=True)
def known_disk():
    """Measuring one takes longer than a run of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.train.prepare.disk_rate", lambda folder: 2e6)
        yield


@pytest.fixture(scope="module")
def made(project):
    return project("frozen on disk", "llama", sections={"adapter": {"r": 4, "target_modules": ["q_proj"]}})


@pytest.fixture(scope="module")
def words(made):
    """Of a plan under which two stages take less than all layers."""
    path = made.folder / "each alone.json"
    path.write_text(EACH_ALONE.to_json())
    return f"engine.plan={path}", "engine.workers=1"


@pytest.fixture(scope="module")
def bills(made, words):
    return [prepare(load_recipe(made.recipe, [*words, *more])) for more in ((), (MMAP,))]


def test_a_run_has_the_numbers_of_ram_and_leaves_no_file(made):
    every = "checkpoint.every_steps=2"
    in_ram = made.train_well("in ram", every)
    on_disk = made.train_well("on disk", every, MMAP, "engine.workers=2", "engine.inject_delays=3")
    assert on_disk.numbers == in_ram.numbers
    assert on_disk.result == in_ram.result
    assert frozen_files(on_disk.folder) == []


@pytest.mark.parametrize(
    "then",
    [
        pytest.param((MMAP, "engine.workers=2"), id="mmap"),
        pytest.param((), id="ram", marks=pytest.mark.slow),
    ],
)
def test_a_broken_run_leaves_its_file_to_the_one_that_resumes(then, made, monkeypatch):
    words, name = (NF4, "checkpoint.every_steps=2"), f"broken {len(then)}"
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train(name, *words, MMAP).code == 1
    (file,) = frozen_files(made.folder / name)
    assert file.suffix == ".bin"
    if then:
        monkeypatch.setattr("rpft.model.load.plan_reads", None)  # it is not needed again
    resumed = made.train_well(name, *words, *then, "--resume")
    monkeypatch.undo()
    unbroken = made.train_well(f"unbroken {len(then)}", *words)
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result
    assert frozen_files(resumed.folder) == []


def test_the_bill_moves_frozen_weights_from_ram_to_disk(bills):
    ram, mmap = bills
    frozen = sum(layout.frozen_bytes for layout in ram.layouts)
    largest = max(layout.region_bytes for layout in ram.layouts)
    assert mmap.bill.host == ram.bill.host - frozen + 2 * largest < ram.bill.host
    assert mmap.bill.host_parts["read ahead from the disk"] == 2 * largest
    on_disk = frozen_file_bytes(ram.layouts)
    assert mmap.memory["disk_bytes"] == ram.memory["disk_bytes"] + on_disk > ram.memory["disk_bytes"]
    assert mmap.frozen_bytes_a_step == mmap.rounds * (  # each block goes up twice, the embedding and the head once
        2 * frozen - ram.layouts[0].frozen_bytes - ram.layouts[5].frozen_bytes
    )


def test_auto_takes_the_disk_only_where_ram_is_short_and_that_fits(made, words, bills):
    ram, mmap = (planned.bill.host for planned in bills)
    found = {}
    for limit in (ram, ram - 1, mmap):
        planned = prepare(load_recipe(made.recipe, [*words, AUTO, f"engine.ram_limit={limit}"]))
        found[limit] = (planned.on_disk, planned.bill.host)
    assert found == {ram: (False, ram), ram - 1: (True, mmap), mmap: (True, mmap)}
    ran = made.train("too much", *words, AUTO, f"engine.ram_limit={mmap - 1}")
    assert ran.code == 2
    assert "this run needs" in ran.err


def test_a_run_that_is_short_of_ram_is_told_of_the_disk(bills):
    ram, mmap = bills
    settings = [change.setting for change in tries._smaller_changes(ram)]
    assert "engine.host_store=mmap" in settings
    assert "engine.host_store=mmap" not in [change.setting for change in tries._smaller_changes(mmap)]


def test_a_disk_without_room_for_the_file_is_refused_before_it_is_written(made, words, bills, monkeypatch):
    needed = bills[1].memory["disk_bytes"]
    monkeypatch.setattr(files, "free_bytes", lambda path: needed - 1)
    ran = made.train("no room", *words, MMAP)
    assert ran.code == 2
    assert "frozen weights" in ran.err
    assert "are free on that disk" in ran.err
    assert frozen_files(made.folder / "no room") == []
    monkeypatch.setattr(files, "free_bytes", lambda path: needed)
    assert made.train("no room", *words, MMAP, "--dry-run").code == 0


def test_a_disk_that_fills_up_meanwhile_ends_the_run_with_advice(made, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ran = made.train("filled up", MMAP)
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert "set engine.host_store to ram" in ran.err
    assert frozen_files(made.folder / "filled up") == []


def test_the_plan_says_what_it_saves_and_costs(made, words):
    for command in (("plan", made.recipe), ("train", made.recipe, "--dry-run")):
        ran = run_rpft(*command, f"output_dir={made.folder / 'planned'}", *words, MMAP)
        assert ran.code == 0, ran.err
        assert "frozen weights lie in a file in output_dir" in ran.out
        assert "less RAM; a step reads" in ran.out
        assert "at 0.002 GB/s at least" in ran.out
    ran = run_rpft("plan", made.recipe, *words, MMAP, "--json")
    parts = json.loads(ran.out)["memory_parts"]
    assert parts["disk_bytes"]["frozen weights"] > 0
    assert parts["host_bytes"]["read ahead from the disk"] > 0


def test_a_rate_is_measured_and_leaves_nothing(tmp_path):
    rate = disk_rate(tmp_path / "not yet there", 1 << 20)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_rate(tmp_path / "not yet there", 1 << 20) == rate


def test_without_an_adapter_it_is_refused_by_name(project):
    ran = project("full, on disk", "llama").train("out", MMAP)
    assert ran.code == 2
    assert "engine.host_store is mmap and there is no adapter" in ran.err


def test_another_value_is_refused_with_the_known_ones(made):
    ran = made.train("out", "engine.host_store=disk")
    assert ran.code == 2
    assert "mmap" in ran.err
    assert "auto" in ran.err
