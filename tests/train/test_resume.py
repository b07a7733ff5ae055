"""A run that goes on from a checkpoint is the unbroken run, bit for bit; what cannot be gone on is refused."""

import hashlib
import json
import shutil

import pytest
from support.checkpoints import rewritten
from support.engines import plan_of
from support.recipes import Crash, chats, crash_at, unbroken_runs, watch

from rpft.errors import UserError
from rpft.optim.schedule import Schedule

PROJECTS = {
    "full": ("qwen3", {}),
    "LoRA": ("llama", {"adapter": {"r": 4, "dropout": 0.2}}),
    "full bfloat16": ("llama", {"model": {"dtype": "bfloat16"}, "engine": {"host_gradients": "float32"}}),
    "bfloat16 gradients": ("llama", {"model": {"dtype": "bfloat16"}}),
    "traced": ("llama", {"engine": {"kernels": "trace"}, "data": {"max_seq_len": 24, "truncation": "right"}}),
    "bf16 moments": ("qwen3", {"optimizer": {"state": "bf16"}}),
    "8-bit moments": ("llama", {"optimizer": {"state": "8bit", "update": "delayed"}, "adapter": {"r": 4}}),
    "router loss": ("qwen3_moe", {"train": {"router_aux_loss": 0.1}}),
    "delayed": ("llama", {"optimizer": {"update": "delayed"}}),
    "delayed bfloat16": ("llama", {"optimizer": {"update": "delayed"}, "model": {"dtype": "bfloat16"}}),
}


@pytest.fixture(scope="module")
def runs(project):
    """runs(name) -> the project, and its unbroken run of 4 steps."""
    return unbroken_runs(project, "resume", PROJECTS, {"eval_every": 2})


@pytest.mark.parametrize("name", PROJECTS)
def test_four_steps_equal_two_steps_a_save_and_two_steps(name, runs, monkeypatch):
    made, unbroken = runs(name)
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train(name, "checkpoint.every_steps=2").code == 1
    plan = made.folder / "another plan.json"
    # Gradients in bfloat16 would be rounded between two rounds.
    num_microbatches = 4 if name in ("bfloat16 gradients", "delayed bfloat16") else 3
    plan.write_text(plan_of([(0, 0), (1, 3)], [(4, 5), (0, 3)], num_microbatches, "layer").to_json())
    resumed = made.train_well(
        name,
        "checkpoint.every_steps=2",
        "--resume",
        f"engine.plan={plan}",
        "engine.workers=3",
        "engine.inject_delays=1",
    )
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


def test_gradients_of_another_precision_on_resume_are_refused(runs):
    made, _ = runs("bfloat16 gradients")
    made.train_well("precision", "checkpoint.every_steps=4")
    ran = made.train("precision", "--resume", "engine.host_gradients=float32")
    assert ran.code == 2
    assert "engine.host_gradients was bfloat16 and is float32" in ran.err


def test_moments_of_another_format_are_refused_and_by_force_too_unless_they_stay_exact(runs, monkeypatch):
    made, _ = runs("bf16 moments")
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train("formats", "checkpoint.every_steps=2").code == 1
    ran = made.train("formats", "--resume", "optimizer.state=8bit")
    assert ran.code == 2
    assert "optimizer.state was bf16 and is 8bit" in ran.err
    ran = made.train("formats", "--resume", "--force", "optimizer.state=8bit")
    assert ran.code == 2
    assert "its moments are bf16, and optimizer.state is 8bit, which would round them" in ran.err
    ran = made.train("formats", "--resume", "--force", "optimizer.state=fp32")
    assert ran.code == 0


def test_a_checkpoint_from_before_moments_had_formats_goes_on_with_float32_ones(runs, monkeypatch):
    made, unbroken = runs("full")
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train("plain", "checkpoint.every_steps=2").code == 1
    state = made.folder / "plain" / "checkpoints" / "step-00000002" / "state.json"
    with rewritten(state) as older:
        del older["run"]["optimizer"]["state"]
    resumed = made.train_well("plain", "checkpoint.every_steps=2", "--resume")
    assert resumed.numbers == unbroken.numbers


def test_a_checkpoint_from_before_gradients_could_be_rounded_goes_on_with_float32_ones(runs, monkeypatch):
    made, unbroken = runs("full bfloat16")
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train("older", "checkpoint.every_steps=2").code == 1
    state = made.folder / "older" / "checkpoints" / "step-00000002" / "state.json"
    with rewritten(state) as older:
        del older["run"]["engine"]
    refused = made.train("older", "checkpoint.every_steps=2", "--resume", "engine.host_gradients=auto")
    assert refused.code == 2
    assert "engine.host_gradients was float32 and is bfloat16" in refused.err
    resumed = made.train_well("older", "checkpoint.every_steps=2", "--resume")
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


TEN_ROWS = {"train": {"gradient_accumulation_steps": 2, "num_epochs": 3, "max_steps": None, "learning_rate": 3e-3}}


@pytest.fixture(scope="module")
def ten_rows(project):
    """10 rows in steps of 2 for 3 epochs: 15 steps; and the unbroken run."""
    made = project("ten rows", "llama", rows=chats(10), sections=TEN_ROWS)
    return made, made.train_well("unbroken")


@pytest.mark.parametrize("crash", ["at the save", 8, 11, 13])
def test_a_run_killed_after_step_7_goes_on_with_step_8(crash, ten_rows, monkeypatch):
    made, unbroken = ten_rows
    output = f"crash {crash}"
    with monkeypatch.context() as patch:
        if crash == "at the save":
            watch(patch, on_save=lambda path: (_ for _ in ()).throw(Crash()))
        else:
            crash_at(crash, patch)
        assert made.train(output, "checkpoint.every_steps=7").code == 1
    broken = made.outcome(output)
    # A save is reported when it is whole, which may be some steps later.
    assert broken.steps[-1]["step"] >= 7 if crash == "at the save" else broken.steps[-1]["step"] == crash
    assert not broken.result
    with (broken.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # the line that was being written
    resumed = made.train_well(output, "checkpoint.every_steps=7", "--resume")
    assert [line["step"] for line in resumed.steps] == list(range(1, 16))
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result
    schedule = Schedule("cosine", 3e-3, 15, warmup_ratio=0.25)
    assert resumed.steps[7]["learning_rate"] == schedule(8)


def test_train_resume_from_checkpoint_goes_on_from_the_newest_or_a_given_one(ten_rows):
    made, unbroken = ten_rows
    made.train_well("twice", "checkpoint.every_steps=5", "checkpoint.keep_last=9")
    for value in ("true", made.folder / "twice" / "checkpoints" / "step-00000005"):
        again = made.train_well("twice", f"train.resume_from_checkpoint={value}")
        assert again.numbers == unbroken.numbers
        assert again.result == unbroken.result


@pytest.mark.parametrize(("output", "words"), [("unbroken", []), ("nothing there", ["--resume"])])
def test_an_output_directory_that_will_not_do_is_refused_before_anything_is_measured(
    output, words, ten_rows, monkeypatch
):
    made, _ = ten_rows
    monkeypatch.setattr("rpft.train.prepare.prepare", lambda *_: pytest.fail("prepared a run that is refused"))
    assert made.train(output, *words).code == 2


@pytest.mark.parametrize("words", [["--resume"], ["train.resume_from_checkpoint=true"]], ids=str)
def test_resuming_without_a_checkpoint_is_an_error_and_not_a_silent_restart(words, ten_rows):
    made, _ = ten_rows
    ran = made.train("nothing there", *words)
    assert ran.code == 2
    assert "no whole checkpoint" in ran.err
    assert not (made.folder / "nothing there").exists()


def test_a_checkpoint_path_that_is_none_is_an_error(ten_rows):
    made, _ = ten_rows
    ran = made.train("nothing there", "train.resume_from_checkpoint=no/such/step-00000001")
    assert ran.code == 2
    assert "no/such/step-00000001" in ran.err
    assert not (made.folder / "nothing there").exists()


@pytest.fixture(scope="module")
def three_checkpoints(ten_rows):
    """The output directory of a run that has checkpoints of steps 5, 10 and 15."""
    made, _ = ten_rows
    made.train_well("three", "checkpoint.every_steps=5", "checkpoint.keep_last=3")
    return made.folder / "three"


def truncate(folder):
    file = folder / "layer-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def lose_a_layer(folder):
    (folder / "layer-00002.safetensors").unlink()


def lose_the_state(folder):
    (folder / "state.json").unlink()


def garble_the_state(folder):
    (folder / "state.json").write_text('{"version": 1, "sizes": {}, "st')


def flip_a_bit(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def flip_a_bit_of_a_layer(folder):
    flip_a_bit(folder / "layer-00002.safetensors", -100)


def flip_a_bit_of_the_state(folder):
    """The step, 15, becomes 55."""
    state = folder / "state.json"
    flip_a_bit(state, state.read_bytes().index(b'"step": 15') + len('"step": '))


def leave_unfinished(folder):
    folder.rename(folder.with_name(folder.name + ".partial"))


TEARS = [
    truncate,
    lose_a_layer,
    lose_the_state,
    garble_the_state,
    flip_a_bit_of_a_layer,
    flip_a_bit_of_the_state,
    leave_unfinished,
]


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_newest_checkpoint_is_named_and_the_one_before_is_used(tear, ten_rows, three_checkpoints, caplog):
    made, unbroken = ten_rows
    output = made.folder / tear.__name__
    shutil.copytree(three_checkpoints, output)
    shutil.rmtree(output / "model")
    tear(output / "checkpoints" / "step-00000015")
    words = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "--resume")
    ran = made.train(tear.__name__, *words)
    assert ran.code == 0, ran.err
    assert "step-00000015" in caplog.text
    assert f"resuming from {output / 'checkpoints' / 'step-00000010'}" in ran.out
    resumed = made.outcome(tear.__name__)
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result
    assert resumed.checkpoints == ["step-00000015"]


def test_a_torn_checkpoint_never_pushes_out_a_whole_one(ten_rows, three_checkpoints, monkeypatch):
    made, unbroken = ten_rows
    output = made.folder / "torn stays"
    shutil.copytree(three_checkpoints, output)
    for step in (10, 15):
        truncate(output / "checkpoints" / f"step-000000{step}")
    with monkeypatch.context() as patch:
        crash_at(8, patch)
        assert made.train("torn stays", "checkpoint.every_steps=7", "checkpoint.keep_last=1", "--resume").code == 1
    ran = made.train("torn stays", "checkpoint.every_steps=7", "checkpoint.keep_last=1", "--resume")
    assert "step-00000007" in ran.out
    assert made.outcome("torn stays").numbers == unbroken.numbers


def test_another_learning_rate_on_resume_is_refused_with_the_difference(ten_rows, three_checkpoints):
    made, _ = ten_rows
    before = (three_checkpoints / "recipe.yaml").read_text()
    ran = made.train("three", "--resume", "train.learning_rate=1e-3", "optimizer.betas=[0.9, 0.95]")
    assert ran.code == 2
    assert "train.learning_rate was 0.003 and is 0.001" in ran.err
    assert "optimizer.betas was [0.9, 0.999] and is [0.9, 0.95]" in ran.err
    assert (three_checkpoints / "recipe.yaml").read_text() == before


def test_force_goes_on_with_another_learning_rate_and_says_so(ten_rows, three_checkpoints):
    made, unbroken = ten_rows
    output = made.folder / "forced"
    shutil.copytree(three_checkpoints, output)
    words = ("--resume", "--force", "train.learning_rate=1e-3")
    refused = made.train("forced", *words[1:])
    assert (refused.code, "--force is for --resume" in refused.err) == (2, True)
    refused = made.train("forced", "--resume", str(output / "checkpoints" / "step-00000010"), *words[1:])
    assert refused.code == 2
    assert "step-00000015 of the run before lie beside it" in refused.err
    shutil.rmtree(output / "checkpoints" / "step-00000015")
    ran = made.train("forced", *words)
    assert ran.code == 0, ran.err
    assert "going on with another run, as --force asks for: train.learning_rate was 0.003 and is 0.001" in ran.out
    outcome = made.outcome("forced")
    assert outcome.numbers[:11] == unbroken.numbers[:11]
    assert outcome.steps[10]["learning_rate"] == pytest.approx(unbroken.steps[10]["learning_rate"] / 3)


def test_what_may_differ_is_listed(ten_rows, three_checkpoints):
    made, unbroken = ten_rows
    shutil.copytree(three_checkpoints, made.folder / "harmless")
    ran = made.train("harmless", "--resume", "engine.workers=2", "checkpoint.keep_last=7", "train.eval_every=20")
    assert ran.code == 0, ran.err
    listed = [line.partition("roundings: ")[2] for line in ran.out.splitlines() if "roundings: " in line]
    assert "engine.workers was 1 and is 2" in " ".join(listed)
    assert "recipe.checkpoint.keep_last was 3 and is 7" in listed
    assert "recipe.train.eval_every was None and is 20" in listed
    assert "learning_rate" not in ran.out.partition("resuming from")[0].partition("training:")[0]
    assert made.outcome("harmless").numbers == unbroken.numbers


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["--resume", "latest"], 15),
        (["--resume=latest"], 15),
        (["--resume", "{}/step-00000010"], 10),
        (["--resume={}/step-00000010/"], 10),
        (["--resume", "engine.workers=1"], 15),
    ],
)
def test_resume_takes_a_folder_or_latest_or_stands_alone(words, step, ten_rows, three_checkpoints, monkeypatch):
    made, _ = ten_rows
    found = []

    def stop(prepared, reporter):
        return type("Trainer", (), {"run": lambda self, checkpoint: found.append(checkpoint)})()

    monkeypatch.setattr("rpft.train.loop.Trainer", stop)
    ran = made.train("three", *[word.format(three_checkpoints / "checkpoints") for word in words])
    assert ran.code == 0, ran.err
    assert found == [three_checkpoints / "checkpoints" / f"step-000000{step}"]


def test_other_rows_of_the_same_number_and_length_are_refused(project):
    rows = chats(8)
    made = project("same size", "llama", rows=rows, sections={"train": {"max_steps": 2}})
    made.train_well("out", "checkpoint.every_steps=1")
    other = made.folder / "other.jsonl"
    lines = (made.folder / "train.jsonl").read_text().splitlines()
    other.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    ran = made.train("out", "--resume", f"data.train=[{other}]")
    assert ran.code == 2
    assert "data.sha256 was" in ran.err


def test_other_rows_on_resume_are_refused(ten_rows, three_checkpoints, tmp_path):
    made, _ = ten_rows
    ran = made.train("three", "--resume", f"data.train=[{made.folder / 'eval.jsonl'}]")
    assert ran.code == 2
    assert "data.items was 10 and is 5" in ran.err


def test_a_new_run_into_a_directory_that_holds_one_is_refused_with_advice(ten_rows):
    made, unbroken = ten_rows
    before = unbroken.result
    ran = made.train("unbroken")
    assert ran.code == 2
    assert "already holds a run" in ran.err
    assert "--resume" in ran.err
    assert made.outcome("unbroken").result == before


def test_resume_is_advised_only_where_there_is_a_checkpoint(ten_rows):
    made, _ = ten_rows
    folder = made.folder / "broke off"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    ran = made.train("broke off")
    assert (ran.code, "no checkpoint for --resume to go on from" in ran.err) == (2, True)
    (folder / "checkpoints" / "step-00000001").mkdir()
    ran = made.train("broke off")
    assert (ran.code, "give --resume to go on with it" in ran.err) == (2, True)


def test_a_result_folder_that_is_not_the_runs_own_is_never_replaced(ten_rows):
    made, _ = ten_rows
    shutil.copytree(made.folder / "base", made.folder / "mine" / "model")
    ran = made.train("mine")
    assert ran.code == 2
    assert "model" in ran.err


def test_keep_last_decides_how_many_checkpoints_stay(ten_rows):
    made, _ = ten_rows
    outcome = made.train_well("last", "checkpoint.every_steps=2", "checkpoint.keep_last=3")
    assert outcome.checkpoints == ["step-00000010", "step-00000012", "step-00000014"]


@pytest.fixture
def best_at_step_6(monkeypatch):
    """Evaluations at 0, 3, ... 15 with losses that are lowest after step 6."""
    sums = iter([50.0, 40.0, 10.0, 20.0, 30.0, 20.0])
    monkeypatch.setattr("rpft.train.machinery.Engine.evaluate", lambda self, batches: next(sums))


@pytest.mark.usefixtures("best_at_step_6")
def test_keep_best_keeps_the_checkpoint_with_the_lowest_loss_beside_the_last(ten_rows):
    made, _ = ten_rows
    words = (
        "train.eval_every=3",
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=true",
    )
    assert made.train_well("best", *words).checkpoints == ["step-00000006", "step-00000012"]


@pytest.mark.usefixtures("best_at_step_6")
def test_without_keep_best_the_best_checkpoint_goes_like_any_other(ten_rows):
    made, _ = ten_rows
    words = ("train.eval_every=3", "checkpoint.every_steps=3", "checkpoint.keep_last=1")
    assert made.train_well("not best", *words).checkpoints == ["step-00000015"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapters_checkpoint_is_no_larger_than_adapter_and_state(dtype, runs):
    made, _ = runs("LoRA")
    outcome = made.train_well(f"size {dtype}", f"model.dtype={dtype}", "checkpoint.every_steps=4", "adapter.r=16")
    folder = outcome.folder / "checkpoints" / "step-00000004"
    size = sum(file.stat().st_size for file in folder.iterdir())
    adapter = (outcome.folder / "adapter" / "adapter_model.safetensors").stat().st_size
    trained = adapter // (4 if dtype == "float32" else 2)
    state = 8 * trained if dtype == "float32" else 12 * trained
    assert size <= 1.1 * (adapter + state)


def test_every_minutes_saves_by_the_clock(ten_rows):
    made, _ = ten_rows
    outcome = made.train_well("minutes", "checkpoint.every_minutes=1e-9", "train.max_steps=3")
    assert outcome.checkpoints == ["step-00000002", "step-00000003"]


def test_the_state_file_says_which_step_and_which_run(three_checkpoints):
    state = json.loads((three_checkpoints / "checkpoints" / "step-00000010" / "state.json").read_text())
    assert state["step"] == 10
    assert state["run"]["train"]["learning_rate"] == 3e-3
    assert len(state["files"]) == 6
    for name, record in state["files"].items():
        content = (three_checkpoints / "checkpoints" / "step-00000010" / name).read_bytes()
        assert record == {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert state["about"]["recipe"]["engine"]["workers"] == 1
    assert json.loads(state["about"]["plan"])["num_microbatches"] > 0
    assert set(state["about"]["versions"]) == {"rpft", "torch", "transformers", "python"}


def forged(**changes):
    """A state.json whose checksum is right and whose content no rpft has written."""

    def forge(state):
        with rewritten(state) as content:
            content.update(changes)
            for key in [key for key, value in content.items() if value is None]:
                del content[key]

    return forge


HOSTILE = {
    "deep": lambda state: state.write_text("[" * 200_000),
    "a list": lambda state: state.write_text("[1, 2]"),
    "not text": lambda state: state.write_bytes(b"\x80\x04\x95"),
    "a file outside": forged(files={"../../recipe.yaml": {"num_bytes": 1, "sha256": "0"}}),
    "files that are none": forged(files=[1]),
    "a record that is none": forged(files={"layer-00000.safetensors": {"num_bytes": 1}}),
    "no step": forged(step=None),
    "a step that is text": forged(step="15"),
    "a count below zero": forged(updates_applied=-3),
    "a key too many": forged(__class__="os.system"),
    "no run": forged(run=7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_checkpoint_that_no_rpft_has_written_is_refused_or_passed_over_in_one_line(
    name, ten_rows, three_checkpoints, monkeypatch, caplog
):
    made, _ = ten_rows
    output = made.folder / f"hostile {name}"
    (output / "checkpoints").mkdir(parents=True)
    for step in (10, 15):
        folder = f"checkpoints/step-000000{step}"
        shutil.copytree(three_checkpoints / folder, output / folder)
    HOSTILE[name](output / "checkpoints" / "step-00000015" / "state.json")
    refused = made.train(output.name, "--resume", str(output / "checkpoints" / "step-00000015"))
    assert refused.code == 2
    assert "not a whole checkpoint" in refused.err
    assert len(refused.err.strip().splitlines()) == 1
    monkeypatch.setattr("rpft.train.prepare.prepare", lambda *_: (_ for _ in ()).throw(UserError("that far")))
    assert "that far" in made.train(output.name, "--resume").err
    assert "step-00000015 is not whole" in caplog.text
