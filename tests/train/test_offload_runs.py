"""`rpft train` and `rpft plan` with moments in a file on the disk: numbers, checkpoints, faults, bills, errors."""

import errno
import json
import os
from pathlib import Path

import pytest
from support.recipes import crash_at, run_rpft

from rpft import files
from rpft.model import moments_file
from rpft.model.moments_file import MomentsFile, moments_file_bytes, moments_pieces, window_bytes
from rpft.optim.moments_window import MomentsWindow
from rpft.plan.disk_rate import turnover_rate
from rpft.recipe.load import load_recipe
from rpft.train import room, tries
from rpft.train.prepare import prepare

KINDS = {
    "full": {},
    "bfloat16, delayed": {"model": {"dtype": "bfloat16"}, "optimizer": {"update": "delayed"}},
    "LoRA": {"adapter": {"r": 4, "dropout": 0.2}},
    "bf16 moments": {"optimizer": {"state": "bf16"}},
    "8bit moments": {"optimizer": {"state": "8bit"}},
}
EVERY = "checkpoint.every_steps=1"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Layers of the tiny models have several."""
    monkeypatch.setattr(moments_file, "PIECE_PARAMETERS", 4096)


@pytest.fixture(scope="module")
def in_ram(project):
    """in_ram(kind) -> the project, and its run with moments in RAM."""
    known = {}

    def of(kind):
        made = project(f"offload {kind}", "qwen3", sections=KINDS[kind])
        if kind not in known:
            known[kind] = made.train_well("in ram", EVERY)
        return made, known[kind]

    return of


def offload(made):
    return f"optimizer.offload={made.folder}"


def saved(outcome, step=4):
    folder = outcome.folder / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


SLOW = {"LoRA", "bf16 moments"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS]
)
def test_numbers_results_and_checkpoints_are_those_of_ram_to_the_byte(kind, in_ram):
    made, expected = in_ram(kind)
    before = sorted(os.listdir(made.folder))
    on_disk = made.train_well("on disk", EVERY, offload(made), "engine.workers=2", "engine.inject_delays=3")
    assert (on_disk.numbers, on_disk.result) == (expected.numbers, expected.result)
    for step in (3, 4):
        assert saved(on_disk, step) == saved(expected, step)
    assert sorted(os.listdir(made.folder)) == sorted([*before, "on disk"])


@pytest.mark.parametrize(
    ("first", "then"), [("disk", "disk"), ("disk", "ram"), pytest.param("ram", "disk", marks=pytest.mark.slow)]
)
def test_a_broken_run_goes_on_from_its_checkpoint_wherever_its_moments_lie(first, then, in_ram, monkeypatch):
    made, expected = in_ram("full")
    words = {"disk": [offload(made)], "ram": []}
    output = f"{first} {then}"
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train(output, EVERY, *words[first]).code == 1
    ran = made.train(output, EVERY, *words[then], "--resume")
    assert ran.code == 0, ran.err
    resumed = made.outcome(output)
    assert (resumed.numbers, resumed.result) == (expected.numbers, expected.result)
    assert saved(resumed) == saved(expected)


def test_moments_of_another_format_are_taken_over_into_the_file_as_into_ram(in_ram, monkeypatch):
    made, _ = in_ram("full")
    outcomes = []
    for name, words in (("to ram", []), ("to disk", [offload(made)])):
        with monkeypatch.context() as patch:
            crash_at(3, patch)
            assert made.train(name, EVERY, "optimizer.state=bf16").code == 1
        outcomes.append(made.train_well(name, EVERY, *words, "--resume", "--force"))
    ram, disk = outcomes
    assert (disk.numbers, disk.result) == (ram.numbers, ram.result)
    assert saved(disk) == saved(ram)


@pytest.mark.parametrize("operation", ["read_at", "write_at"])
def test_a_disk_that_breaks_ends_the_run_and_leaves_the_last_checkpoint_whole(operation, in_ram, monkeypatch):
    made, expected = in_ram("full")
    whole, complete = getattr(files, operation), []

    def broken(descriptor, data, offset):
        if len(complete) == 3:  # and the save of step 2 is whole by then, since step 4 waits for step 3's
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        whole(descriptor, data, offset)

    settled = MomentsWindow.settle
    with monkeypatch.context() as patch:
        patch.setattr(MomentsWindow, "settle", lambda window: settled(window) or complete.append(window))
        patch.setattr(files, operation, broken)
        ran = made.train(f"broken {operation}", EVERY, offload(made))
    assert ran.code == 5, ran.err
    way = "from" if operation == "read_at" else "to"
    assert f"optimizer {way} disk: moments of layer" in ran.err
    assert "Input/output error" in ran.err
    assert "Traceback" not in ran.err
    resumed = made.train_well(f"broken {operation}", EVERY, offload(made), "--resume")
    assert (resumed.numbers, resumed.result) == (expected.numbers, expected.result)


def test_two_runs_at_once_in_one_folder_share_nothing(in_ram):
    made, _ = in_ram("full")
    layouts = prepare(load_recipe(made.recipe, [offload(made)])).layouts
    one, other = (MomentsFile(made.folder, layouts, "fp32") for _ in range(2))
    one.write(1, "exp_avg", 0, one.read(1, "exp_avg", 0, 100) + 1.0)
    assert not other.read(1, "exp_avg", 0, 100).any()


def test_the_bill_moves_moments_from_ram_to_the_disk_and_counts_the_window(in_ram):
    made, _ = in_ram("full")
    ram, disk = (prepare(load_recipe(made.recipe, words)) for words in ([], [offload(made)]))
    pieces = moments_pieces(ram.layouts, "fp32")
    moments = 8 * sum(layout.num_trained for layout in ram.layouts)
    assert disk.bill.host == ram.bill.host - moments + window_bytes(pieces) < ram.bill.host
    assert disk.bill.host_parts["moments on their way"] == window_bytes(pieces)
    assert disk.memory["disk_bytes"] == ram.memory["disk_bytes"] + moments_file_bytes(pieces)


def test_an_update_is_predicted_to_take_as_long_as_the_slower_of_pass_and_disk(in_ram, monkeypatch):
    made, _ = in_ram("full")
    steps = {}
    for rate in (1e15, 2e6, 1e6):
        monkeypatch.setattr("rpft.train.prepare.turnover_rate", lambda folder, rate=rate: rate)
        planned = prepare(load_recipe(made.recipe, [offload(made), "engine.workers=1"]), measured=True)
        prediction = planned.prediction()
        assert prediction is not None
        steps[rate] = prediction
    moments = 8 * sum(layout.num_trained for layout in planned.layouts)
    assert steps[1e15].saved_seconds["disk"] == 0
    assert steps[1e15].limited_by != "disk"
    assert steps[1e6].limited_by == "disk"
    more = steps[1e6].step_seconds - steps[2e6].step_seconds
    assert more == pytest.approx(moments / 1e6 - moments / 2e6, rel=0.1)
    in_memory = prepare(load_recipe(made.recipe, ["engine.workers=1"]), measured=True).prediction()
    assert in_memory is not None
    assert "disk" not in in_memory.saved_seconds
    assert in_memory.step_seconds == steps[1e15].step_seconds


def test_a_run_that_is_short_of_ram_is_told_of_the_disk(in_ram, monkeypatch):
    made, _ = in_ram("full")
    words = "engine.ram_limit=1MiB", "engine.recompute=layer", "engine.num_microbatches=1"
    setting = f"optimizer.offload={made.folder}"
    ran = made.train("too much", *words)
    assert ran.code == 2
    assert setting in ran.err
    ram = prepare(load_recipe(made.recipe, words[1:]))
    tried = {each.setting: each.planned.bill for each in tries._tried(ram, tries._smaller_changes(ram))}
    moments = 8 * sum(layout.num_trained for layout in ram.layouts)
    store = "weights, gradients, optimizer state"
    assert tried[setting].host_parts[store] == ram.bill.host_parts[store] - moments
    assert "optimizer.offload" not in made.train("too much", *words, offload(made)).err
    monkeypatch.setattr(tries, "lies_in_ram", lambda folder: True)
    assert "optimizer.offload" not in made.train("too much", *words).err


def test_a_disk_without_room_is_refused_with_the_bill_before_anything_is_written(in_ram, monkeypatch):
    made, _ = in_ram("full")
    needed = prepare(load_recipe(made.recipe, [offload(made)])).memory["disk_bytes"]
    monkeypatch.setattr(files, "free_bytes", lambda path: needed - 1)
    ran = made.train("no room", offload(made))
    assert ran.code == 2
    assert "moments" in ran.err
    assert "are free on that disk" in ran.err
    assert "optimizer.offload=null" in ran.err
    monkeypatch.setattr(files, "free_bytes", lambda path: needed)
    assert made.train("no room", offload(made), "--dry-run").code == 0


def test_another_disk_has_a_bill_of_its_own(in_ram, monkeypatch):
    made, _ = in_ram("full")
    beside = prepare(load_recipe(made.recipe, []))
    needed = moments_file_bytes(moments_pieces(beside.layouts, "fp32"))
    monkeypatch.setattr("rpft.train.prepare.room_apart", lambda folder, recipe: needed)
    planned = prepare(load_recipe(made.recipe, [offload(made)]))
    assert planned.memory["offload_bytes"] == needed
    assert planned.memory["disk_bytes"] == beside.memory["disk_bytes"]
    monkeypatch.setattr("rpft.train.prepare.room_apart", lambda folder, recipe: needed - 1)
    ran = made.train("apart", offload(made), "--dry-run")
    assert ran.code == 2, ran.err
    assert f"optimizer.offload {made.folder}: the moments need" in ran.err
    assert "optimizer.offload=null" in ran.err


def test_a_disk_that_fills_up_before_the_run_begins_ends_it_with_advice(in_ram, monkeypatch):
    made, _ = in_ram("full")

    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    ran = made.train("filled up", offload(made))
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert "name a folder of another disk" in ran.err


def test_a_folder_that_will_not_do_is_refused_by_what_is_wrong_with_it(in_ram, monkeypatch):
    made, _ = in_ram("full")
    said = {}
    closed = made.folder / "closed"
    closed.mkdir(exist_ok=True)
    for name, path in (
        ("none", made.folder / "nvm"),
        ("file", made.recipe),
        ("closed", closed),
        ("tmpfs", closed),
    ):
        with monkeypatch.context() as patch:
            if name == "closed":
                patch.setattr(os, "access", lambda path, mode: Path(path) != closed)
            if name == "tmpfs":
                patch.setattr(room, "lies_in_ram", lambda folder: folder == closed)
            ran = made.train("refused", f"optimizer.offload={path}")
        assert ran.code == 2
        assert f"optimizer.offload {path}" in ran.err
        said[name] = ran.err
    assert "there is no such folder" in said["none"]
    assert "that is a file" in said["file"]
    assert "may not write" in said["closed"]
    assert "lies in RAM" in said["tmpfs"]
    assert not (made.folder / "refused").exists()


def test_the_plan_says_what_it_saves_and_costs(in_ram):
    made, _ = in_ram("full")
    for command in (("plan", made.recipe), ("train", made.recipe, "--dry-run")):
        ran = run_rpft(*command, f"output_dir={made.folder / 'planned'}", offload(made))
        assert ran.code == 0, ran.err
        assert f"moments lie in a file in {made.folder}: " in ran.out
        assert "an update reads" in ran.out
        assert "at 1 GB/s" in ran.out
    ran = run_rpft("plan", made.recipe, offload(made), "--json")
    told = json.loads(ran.out)
    assert told["memory_parts"]["disk_bytes"]["moments"] > 0
    assert told["memory_parts"]["host_bytes"]["moments on their way"] > 0
    assert told["machine"]["turnover"] == 1e9
    ran = run_rpft("plan", made.recipe, offload(made), "--html", made.folder / "plan.html")
    assert ran.code == 0, ran.err
    assert "moments lie in a file" in (made.folder / "plan.html").read_text()


def test_a_machine_that_one_need_not_have_may_say_how_fast_its_disk_is(in_ram):
    made, _ = in_ram("full")
    machine = made.folder / "mine.yaml"
    gpus = "gpus: [{name: X, count: 1, tflops: 10, memory_gib: 24, link_gbps: 20}]\n"
    for disk, said in (("", "the disk's rate is not known"), (", disk_gbps: 0.001", "at 0.001 GB/s")):
        machine.write_text(f"{gpus}host: {{ram_gib: 64, memory_gbps: 50, cores: 8{disk}}}\n")
        ran = run_rpft("plan", made.recipe, "optimizer.offload=/not/here", "--machine", machine)
        assert ran.code == 0, ran.err
        assert said in ran.out
    assert "limited by disk" in ran.out


def test_the_cache_of_the_system_can_hold_no_measurement_up(tmp_path):
    rate = turnover_rate(tmp_path, 1 << 20)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []
    assert turnover_rate(tmp_path, 1 << 20) == rate
    assert turnover_rate(tmp_path / "not there", 1 << 20) is None
