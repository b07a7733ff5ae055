"""`rpft train` leaves what other programs rely on: metrics, recipe, plan, and a folder that others load."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from peft import PeftModel
from support.recipes import plain_loss_sum, read_jsonl, watch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rpft.plan.plan import read_plan
from rpft.recipe.load import load_recipe

STEP_KEYS = [
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "trained_tokens", "tokens", "tokens_per_second"),
    *("step_seconds", "skipped_steps", "host_rss_bytes", "devices", "optimizer_seconds"),
]
EVAL_KEYS = ["step", "eval_loss", "eval_tokens"]


@pytest.fixture(scope="module")
def full(project):
    sections = {"train": {"max_steps": 5, "eval_every": 2}, "engine": {"workers": 2}}
    made = project("command full", "qwen3", sections=sections)
    return made, made.train_well("out")


@pytest.fixture(scope="module")
def lora(project):
    made = project("command lora", "llama", sections={"adapter": {"r": 4, "dropout": 0.1}})
    return made, made.train_well("out")


def test_metrics_has_a_line_a_step_with_the_documented_keys(full):
    _, outcome = full
    assert [line["step"] for line in outcome.steps] == [1, 2, 3, 4, 5]
    for line in outcome.steps:
        assert list(line) == STEP_KEYS
        assert [list(device) for device in line["devices"]] == [["name", "peak_bytes", "allocation_retries"]] * 2
        assert all(device["peak_bytes"] > 0 for device in line["devices"])
        assert line["tokens"] > line["trained_tokens"] > 0
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])


def test_evaluation_comes_at_the_start_every_eval_every_steps_and_at_the_end(full):
    _, outcome = full
    found = [line for line in outcome.lines if "eval_loss" in line]
    assert [line["step"] for line in found] == [0, 2, 4, 5]
    assert all(list(line) == EVAL_KEYS for line in found)
    order = [(line["step"], "eval_loss" in line) for line in outcome.lines]
    assert order == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
        (5, False),
        (5, True),
    ]


def test_learning_lowers_the_evaluation_loss(full, lora):
    for _, outcome in (full, lora):
        losses = list(outcome.evaluations.values())
        assert losses[-1] < losses[0]


def test_the_recipe_in_the_output_directory_is_the_one_that_ran(full):
    made, outcome = full
    assert load_recipe(outcome.folder / "recipe.yaml") == load_recipe(made.recipe)


def test_the_plan_in_the_output_directory_reads_and_runs_the_same_run(full):
    made, outcome = full
    read_plan(outcome.folder / "plan.json").check(6)
    again = made.train_well("by plan", f"engine.plan={outcome.folder / 'plan.json'}")
    assert again.numbers == outcome.numbers


def test_the_model_folder_gives_transformers_the_loss_of_the_last_evaluation(full):
    made, outcome = full
    model = AutoModelForCausalLM.from_pretrained(outcome.folder / "model").eval()
    check_last_evaluation(made, outcome, model, outcome.folder / "model")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_the_adapter_folder_gives_peft_the_loss_of_the_last_evaluation(lora):
    made, outcome = lora
    base = AutoModelForCausalLM.from_pretrained(made.folder / "base")
    model = PeftModel.from_pretrained(base, outcome.folder / "adapter").eval()
    check_last_evaluation(made, outcome, model, outcome.folder / "adapter")
    assert not (outcome.folder / "model").exists()
    named = json.loads((outcome.folder / "adapter" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(made.folder / "base")


def check_last_evaluation(made, outcome, model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False)
    with torch.no_grad():
        total, count = plain_loss_sum(model, tokenizer, read_jsonl(made.folder / "eval.jsonl"))
    assert outcome.lines[-1]["eval_tokens"] == count
    assert outcome.lines[-1]["eval_loss"] == pytest.approx(float(total) / count, rel=1e-5)


def test_without_evaluation_rows_only_steps_are_written(project):
    made = project("no evaluation", eval_rows=0)
    outcome = made.train_well("out", "train.max_steps=2")
    assert [list(line) for line in outcome.lines] == [STEP_KEYS] * 2


def test_a_held_out_part_of_the_rows_is_evaluated_and_not_trained(project):
    made = project("no evaluation", eval_rows=0)
    words = ("train.num_epochs=1", "train.max_steps=null")
    whole = made.train_well("whole", *words)
    part = made.train_well("held out", *words, "data.eval_fraction=0.25")
    seen = [sum(line["trained_tokens"] for line in outcome.steps) for outcome in (whole, part)]
    assert seen[0] == seen[1] + part.lines[0]["eval_tokens"]
    assert set(part.evaluations) == {0, part.steps[-1]["step"]}


def test_a_dry_run_names_model_rows_plan_and_memory_and_writes_nothing(full):
    made, _ = full
    ran = made.train("dry", "--dry-run")
    assert ran.code == 0
    assert not (made.folder / "dry").exists()
    for said in ("Qwen3ForCausalLM", "24 of 24 rows", "4 microbatches", "fused [", "memory, RAM", "each worker"):
        assert said in ran.out


def test_a_run_that_saves_nothing_on_the_way_says_so_before_it_begins(full):
    made, _ = full
    said = "none on the way"
    assert said in made.train("dry", "--dry-run").out
    assert said not in made.train("dry", "--dry-run", "checkpoint.every_minutes=30").out


@pytest.mark.slow
def test_python_m_rpft_runs_the_same_command(full):
    made, outcome = full
    command = [sys.executable, "-m", "rpft", "train", str(made.recipe), f"output_dir={made.folder / 'process'}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert made.outcome("process").numbers == outcome.numbers
    assert "Traceback" not in ran.stderr


def test_fifty_steps_end_with_the_threads_they_began_with(project, monkeypatch):
    counts = []
    watch(monkeypatch, lambda record: counts.append(threading.active_count()))
    made = project("no evaluation", eval_rows=0)
    before = threading.active_count()
    made.train_well("fifty", "train.max_steps=50", "train.gradient_accumulation_steps=1", "engine.workers=3")
    assert len(counts) == 50
    assert len(set(counts)) == 1
    assert threading.active_count() == before
