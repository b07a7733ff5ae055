"""`rpft bench --simulate MACHINE`: all schedules on a described machine, and what is said of what cannot be."""

import json

import pytest
from support.models import tiny_checkpoint
from support.recipes import run_rpft

from rpft.plan.model_shapes import read_shape, shape_names

NAMES = [
    "gpipe",
    "one_f_one_b",
    "interleaved_1f1b",
    "looped_bfs",
    "mobius",
    "round_pipe_sync",
    "round_pipe_async",
    "rpft_sync",
    "rpft_delayed",
]
PUBLISHED = {  # parameters, in units of 10^9, as the models' cards have them
    "gpt-oss-20b": 20.9,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-8b": 8.2,
}
SMALL = """
gpus:
  - {name: A, count: 2, tflops: 10, memory_gib: 4, link_gbps: 25}
host: {ram_gib: 32, memory_gbps: 80, cores: 8}
"""


@pytest.mark.parametrize("name", shape_names())
def test_a_shipped_shape_has_as_many_parameters_as_its_model(name):
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(read_shape(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "mine.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    tiny_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def compared(machine, shape):
    """What `rpft bench --simulate MACHINE --json` gives for a tiny model."""
    words = ["--model", str(shape), "--sequence", "128", "--rows", "8", "--microbatches", "4", "--json"]
    ran = run_rpft("bench", "--simulate", str(machine), *words)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_every_schedule_is_played_on_the_machine(compared):
    assert list(compared["schedules"]) == NAMES
    assert (compared["workers"], compared["microbatches"], compared["tokens_per_step"]) == (2, 4, 4 * 8 * 128)
    for name, one in compared["schedules"].items():
        assert 0 <= one["bubble_percent"] < 100, name
        assert one["tokens_per_second"] == pytest.approx(4 * 8 * 128 / one["step_seconds"])
        assert one["fits"], name


def test_no_schedule_is_faster_for_counting_more(compared):
    seconds = {name: one["step_seconds"] for name, one in compared["schedules"].items()}
    assert seconds["rpft_sync"] >= seconds["round_pipe_sync"]
    assert seconds["rpft_delayed"] >= seconds["round_pipe_async"]
    assert seconds["round_pipe_async"] <= seconds["round_pipe_sync"]


def test_the_table_for_people_names_schedules_and_says_what_is_counted(machine, shape):
    ran = run_rpft("bench", "--simulate", str(machine), "--model", str(shape), "--sequence", "64")
    assert ran.code == 0, ran.err
    for said in ("GPipe", "1F1B", "Mobius", "RoundPipe, delayed", "rpft, exact", "bubble", "no optimizer"):
        assert said in ran.out


def test_a_card_that_is_too_small_is_said(tmp_path, shape):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("memory_gib: 4", "memory_gib: 0.0001"))
    words = ["--model", str(shape), "--sequence", "128", "--json"]
    ran = run_rpft("bench", "--simulate", str(path), *words)
    assert ran.code == 0, ran.err
    assert not any(one["fits"] for one in json.loads(ran.out)["schedules"].values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["8x4080"], "no such costs file, and no machine is called '8x4080'; did you mean `8x4090`?"),
        (["none.json"], "none.json: no such costs file"),
        (["none.yaml"], "none.yaml: no such machine file; docs/planning.md"),
        (["8x4090", "--model", "qwen3-31b"], "no model shape is called 'qwen3-31b'; did you mean `qwen3-32b`?"),
        (["none.json", "--rows", "2"], "--rows cannot be had with the costs file none.json"),
        (["8x4090", "--model", "r.yaml", "--rows", "2"], "--rows cannot be had with the recipe r.yaml"),
    ],
)
def test_what_cannot_be_compared_is_said_with_what_to_do(words, says):
    ran = run_rpft("bench", "--simulate", *words)
    assert (ran.code, says in ran.err) == (2, True), ran.err


def test_mixed_cards_are_refused(tmp_path, shape):
    path = tmp_path / "mixed.yaml"
    another = "  - {name: B, count: 1, tflops: 5, memory_gib: 4, link_gbps: 25}"
    path.write_text(SMALL.replace("host:", f"{another}\nhost:"))
    ran = run_rpft("bench", "--simulate", str(path), "--model", str(shape))
    assert (ran.code, "cards of one kind, and this machine has A, B" in ran.err) == (2, True)
