"""Layers that run as graphs, and gradients that wait in bfloat16: the same run, through the command."""

import dataclasses
import os
import shutil

import pytest
import torch
from support.recipes import WORDS, chats

import rpft.train.kernels
from rpft.cli.train import describe
from rpft.errors import UserError
from rpft.plan.profile import LayerMeter, LayerProfile
from rpft.recipe.load import load_recipe
from rpft.train.kernels import KernelChoice, choose_gradient_dtype, choose_kernels
from rpft.train.prepare import prepare, set_up

# Rows of 24 tokens at most have two padded lengths, the same ones for graphs and without.
SHORT = {
    "data": {"max_seq_len": 24, "truncation": "right"},
    "train": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3},
}
BFLOAT16 = {"model": {"dtype": "bfloat16"}}
PROJECTS = {
    "llama": ("llama", SHORT),
    "llama, LoRA with dropout": (
        "llama",
        {**SHORT, "adapter": {"r": 4, "dropout": 0.3, "target_modules": ["q_proj", "down_proj"]}},
    ),
    "gpt2 with dropout, delayed": ("gpt2", {**SHORT, "optimizer": {"update": "delayed"}}),
    "qwen3, tied, bfloat16": ("qwen3", {**SHORT, **BFLOAT16}),
    "mixtral, whose experts cannot be traced": ("mixtral", SHORT),
}


@pytest.fixture(scope="module")
def eager(project):
    """eager(name) -> the project, and what its run without graphs left."""
    known = {}

    def of(name):
        family, sections = PROJECTS[name]
        made = project(f"kernels {name}", family, sections=sections, eval_rows=2)
        if name not in known:
            known[name] = made.train_well("eager", "engine.kernels=eager")
        return made, known[name]

    return of


@pytest.mark.parametrize("name", PROJECTS)
def test_traced_layers_give_the_same_numbers_and_weights(name, eager, caplog):
    made, expected = eager(name)
    outcome = made.train_well("trace", "engine.kernels=trace", "engine.workers=2", "engine.inject_delays=5")
    assert outcome.numbers == expected.numbers
    assert outcome.result == expected.result
    assert ("cannot be traced" in caplog.text) == ("cannot be traced" in name)


def test_on_the_cpu_pool_auto_is_eager(eager):
    made, expected = eager("llama")
    assert "kernels: eager; gradients wait in float32" in made.train("dry", "--dry-run").out
    assert made.train_well("auto").numbers == expected.numbers


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler for CPU kernels"
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "tolerance"), [("llama", 1e-5), ("gpt2 with dropout, delayed", 1e-4), ("qwen3, tied, bfloat16", 2e-2)]
)
def test_compiled_layers_give_the_same_numbers_but_for_rounding(name, tolerance, eager):
    made, expected = eager(name)
    outcome = made.train_well("compile", "engine.kernels=compile")
    for mine, theirs in zip(outcome.steps, expected.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
    assert list(outcome.evaluations.values()) == pytest.approx(list(expected.evaluations.values()), rel=tolerance)
    assert outcome.numbers != expected.numbers, "the layers ran as before"


# ---- few shapes


def long_chats():
    """Rows of 20 to 250 tokens or so."""
    rows = []
    for count, row in enumerate(chats(12)):
        answer = " ".join(WORDS[(count * i) % len(WORDS)] for i in range(1, 8 + 20 * (count % 11)))
        rows.append({"messages": [row["messages"][0], {"role": "assistant", "content": answer}]})
    return rows


@pytest.fixture(scope="module")
def long_rows(project):
    sections = {
        "data": {"max_seq_len": 512},
        "train": {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2},
    }
    return project(
        "long rows", "llama", rows=long_chats(), eval_rows=2, sections=sections, max_position_embeddings=512
    )


def lengths_in(ran):
    (line,) = (line for line in ran.out.splitlines() if "kernels: trace" in line)
    return [int(word) for word in line.split("padded to ")[1].split(" tokens")[0].split(", ")]


def check_same_but_for_padding(outcome, expected):
    assert [line["tokens"] for line in outcome.steps] == [line["tokens"] for line in expected.steps]
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.evaluations == pytest.approx(expected.evaluations, rel=1e-5)
    norms = [[line["grad_norm"] for line in run.steps] for run in (outcome, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_traced_rows_are_padded_to_few_lengths_and_learn_the_same(long_rows):
    lengths = lengths_in(long_rows.train("dry", "engine.kernels=trace", "--dry-run"))
    assert 1 < len(lengths) <= 8
    assert all(length % 64 == 0 for length in lengths)
    shapes = set()
    data = prepare(load_recipe(long_rows.recipe, ["engine.kernels=trace"])).data
    for batch in [*data.step(1), *data.step(2), *data.evaluation()]:
        shapes.add(batch.input_ids.shape[1])
    assert shapes <= set(lengths)
    check_same_but_for_padding(
        long_rows.train_well("trace", "engine.kernels=trace"), long_rows.train_well("eager")
    )


def test_packs_are_padded_to_few_lengths_and_learn_the_same(long_rows, caplog):
    words = ("data.packing=true", "data.max_seq_len=300")
    lengths = lengths_in(long_rows.train("dry", "engine.kernels=trace", "--dry-run", *words))
    assert lengths[-1] == 320
    traced = long_rows.train_well("traced packs", "engine.kernels=trace", *words)
    check_same_but_for_padding(traced, long_rows.train_well("packs", *words))
    assert "cannot be traced" not in caplog.text


def test_no_length_goes_beyond_the_positions_of_the_model(project):
    """Neither 64 nor 128 would do for the row."""
    rows = [
        {"messages": [{"role": "user", "content": "one " * 40}, {"role": "assistant", "content": "two " * 30}]}
    ]
    made = project("104 positions", "gpt2", rows=rows, eval_rows=0, n_positions=104)
    (length,) = lengths_in(made.train("dry", "engine.kernels=trace", "--dry-run"))
    assert 64 < length <= 104


# ---- what the machine can do


@pytest.fixture
def machine(monkeypatch):
    """machine(programs, triton, headers) -> what is found on the machine from then on."""

    def has(programs, triton=True, headers=True):
        monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
        if not headers:
            monkeypatch.setattr("rpft.train.kernels._include_folder", lambda: rpft.train.kernels.Path("/nowhere"))

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return has


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_on_a_gpu_auto_compiles_where_triton_and_a_c_compiler_are_there(compiler, machine):
    machine([compiler])
    assert choose_kernels("auto", "cuda") == KernelChoice("compile")
    assert choose_kernels("auto", "cpu") == KernelChoice("eager")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"programs": []}, "no C compiler"),
        ({"programs": ["gcc"], "triton": False}, "Triton"),
        ({"programs": ["gcc"], "headers": False}, "headers"),
    ],
)
def test_on_a_gpu_without_them_auto_traces_and_says_what_is_missing(found, said, machine):
    machine(**found)
    choice = choose_kernels("auto", "cuda")
    assert choice.kind == "trace"
    assert choice.missing is not None
    assert said in choice.missing
    with pytest.raises(UserError, match=said):
        choose_kernels("compile", "cuda")
    assert choose_kernels("trace", "cuda") == KernelChoice("trace")
    assert choose_kernels("eager", "cuda") == KernelChoice("eager")


def test_a_compiler_named_by_the_environment_is_the_one_that_counts(machine, monkeypatch):
    machine(["gcc", "mycc"])
    monkeypatch.setenv("CC", "mycc")
    assert choose_kernels("auto", "cuda").kind == "compile"
    monkeypatch.setenv("CC", "gone")
    assert "$CC, gone, is not one" in (choose_kernels("auto", "cuda").missing or "")


def test_what_was_measured_and_what_is_missing_are_said_in_a_line_each(long_rows):
    prepared = prepare(load_recipe(long_rows.recipe, ["engine.kernels=trace"]))
    profile = LayerProfile(0.001, 0.003, 1 << 20, 3 << 20)
    lines = describe(
        dataclasses.replace(prepared, kernels=KernelChoice("trace", "no compiler"), profiles=[profile] * 6)
    )
    assert sum("no compiler" in line for line in lines) == 1
    (line,) = (line for line in lines if line.startswith("measured"))
    assert "forward 5.0 ms, recompute and backward 15.0 ms, head 3.0 ms; a layer holds up to 3 MiB" in line


def test_a_layer_that_does_not_fit_when_measured_is_refused_with_what_to_change(long_rows, monkeypatch):
    def too_much(*arguments, **more):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(LayerMeter, "measure", too_much)
    bench, said = set_up(load_recipe(long_rows.recipe)), []
    shape = f"{bench.job.rows} x {bench.job.data.longest} tokens"
    with pytest.raises(UserError, match=shape + r" .* train\.micro_batch_size or data\.max_seq_len"):
        bench.measure(bench.conditions(), said.append)
    assert shape in said[0]


# ---- gradients in bfloat16


@pytest.mark.parametrize(
    ("setting", "dtype", "rounds_of", "expected"),
    [
        ("auto", torch.bfloat16, 8, torch.bfloat16),
        ("auto", torch.bfloat16, 12, torch.bfloat16),  # a plan may hold more than a step has
        ("auto", torch.bfloat16, 4, torch.float32),
        ("auto", torch.float32, 8, torch.float32),
        ("auto", torch.float16, 8, torch.float32),
        ("float32", torch.bfloat16, 8, torch.float32),
        ("bfloat16", torch.bfloat16, 8, torch.bfloat16),
    ],
)
def test_gradients_are_rounded_where_that_happens_once(setting, dtype, rounds_of, expected):
    assert choose_gradient_dtype(setting, dtype, rounds_of, 8, "M is") == expected


def test_bfloat16_gradients_take_two_bytes_a_trained_parameter_less(project):
    made = project("rounded gradients", "llama", sections=BFLOAT16)
    rounded, exact = (
        prepare(load_recipe(made.recipe, [f"engine.host_gradients={dtype}"])) for dtype in ("auto", "float32")
    )
    part = "weights, gradients, optimizer state"
    trained = sum(layout.num_trained for layout in rounded.layouts)
    assert exact.bill.host_parts[part] - rounded.bill.host_parts[part] == 2 * trained
    on_the_worker = exact.bill.device - rounded.bill.device  # which is RAM too on the CPU pool
    assert exact.bill.host - rounded.bill.host == 2 * trained + on_the_worker


def test_bfloat16_gradients_learn_what_float32_ones_do_but_for_rounding(project):
    made = project("rounded gradients", "llama", sections=BFLOAT16)
    rounded = made.train_well("rounded", "engine.workers=2")
    exact = made.train_well("exact", "engine.host_gradients=float32", "engine.workers=2")
    assert rounded.losses == pytest.approx(exact.losses, rel=5e-3)
    assert rounded.losses[0] == exact.losses[0]
    assert rounded.steps[0]["grad_norm"] == exact.steps[0]["grad_norm"], "the norm is taken before the rounding"
    assert rounded.losses != exact.losses
