"""Every row is seen once an epoch, in whatever steps, rounds and packs; the loss is the mean of trained tokens."""

import pytest
import torch
from support.recipes import chats, encode_chat, plain_loss_sum, tiny_tokenizer, write_plan
from transformers import AutoModelForCausalLM

ROWS = chats(11)


def trained_tokens(rows):
    labels = [encode_chat(tiny_tokenizer(), row)[1][1:] for row in rows]
    return sum(label >= 0 for row in labels for label in row)


@pytest.fixture(scope="module")
def eleven(project):
    """11 rows in steps of 4: the last step of the run is short."""
    sections = {
        "train": {"max_steps": None, "num_epochs": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    }
    return project("eleven rows", "llama", rows=ROWS, eval_rows=0, sections=sections)


@pytest.fixture(scope="module")
def one_batch(project):
    """All 11 rows in one step, at a rate so small that the weights stay."""
    train = {"max_steps": None, "num_epochs": 1, "gradient_accumulation_steps": 11, "learning_rate": 1e-12}
    return project("one batch", "llama", rows=ROWS, eval_rows=0, sections={"train": train})


@pytest.fixture(scope="module")
def plain(one_batch):
    return one_batch.train_well("plain")


def test_every_row_is_seen_once_an_epoch_with_a_short_last_step(eleven):
    outcome = eleven.train_well("one epoch")
    assert [line["epoch"] for line in outcome.steps] == pytest.approx([4 / 11, 8 / 11, 1], abs=1e-5)
    assert sum(line["trained_tokens"] for line in outcome.steps) == trained_tokens(ROWS)
    assert sum(line["tokens"] for line in outcome.steps) == sum(
        len(encode_chat(tiny_tokenizer(), row)[0]) for row in ROWS
    )
    outcome = eleven.train_well("two epochs", "train.num_epochs=2")
    assert len(outcome.steps) == 6
    assert sum(line["trained_tokens"] for line in outcome.steps) == 2 * trained_tokens(ROWS)


def test_the_loss_of_a_step_is_the_mean_over_its_trained_tokens_not_a_mean_of_means(one_batch, plain):
    model = AutoModelForCausalLM.from_pretrained(one_batch.folder / "base").eval()
    total, count = plain_loss_sum(model, tiny_tokenizer(), ROWS)
    (total / count).backward()
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    (step,) = plain.steps
    assert step["trained_tokens"] == count
    assert step["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_rounds_and_microbatches_that_do_not_come_out_even_neither_hang_nor_lose_a_row(
    m, micro_batch_size, one_batch, plain
):
    """M from 1 to N + 2 for N = 3 workers; a plan file may ask for any M."""
    path = write_plan(one_batch.folder / f"{m}.json", [[0, 2]], [[3, 5], [0, 2]], m)
    name = f"M {m} of {micro_batch_size}"
    words = ("engine.workers=3", f"engine.plan={path}", f"train.micro_batch_size={micro_batch_size}")
    (step,) = one_batch.train_well(name, *words).steps
    (expected,) = plain.steps
    assert step["trained_tokens"] == expected["trained_tokens"]
    assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_packing_changes_no_loss_and_no_gradient_norm(family, project):
    """gemma2 has a sliding window of 8, shorter than most rows."""
    rows = chats(8, seed=5)
    train = {"max_steps": None, "num_epochs": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-12}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    made = project(f"packing {family}", family, rows=rows, eval_rows=0, sections={"train": train}, **no_dropout)
    (alone,) = made.train_well("alone").steps
    (packed,) = made.train_well("packed", "data.packing=true", "data.max_seq_len=96").steps
    assert packed["trained_tokens"] == alone["trained_tokens"] == trained_tokens(rows)
    assert packed["tokens"] == alone["tokens"]
    assert packed["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert packed["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_packs_hold_every_row_once_an_epoch(eleven):
    words = ("data.packing=true", "data.max_seq_len=96", "engine.workers=2")
    outcome = eleven.train_well("packs", *words)
    assert sum(line["trained_tokens"] for line in outcome.steps) == trained_tokens(ROWS)
    assert outcome.steps[-1]["epoch"] == 1
    assert len(outcome.steps) < 3


def test_a_weight_is_how_often_rows_are_seen_in_an_epoch(eleven):
    path = eleven.folder / "train.jsonl"
    outcome = eleven.train_well(
        "weights", f"data.train=[{{path: {path}, weight: 2}}, {{path: {path}, max_rows: 3}}]"
    )
    expected = 2 * trained_tokens(ROWS) + trained_tokens(ROWS[:3])
    assert sum(line["trained_tokens"] for line in outcome.steps) == expected
    assert len(outcome.steps) == 7


def test_held_out_rows_and_what_they_share_with_the_training_rows_are_said(eleven):
    path = eleven.folder / "train.jsonl"
    ran = eleven.train("held out", f"data.train=[{path}, {path}]", "data.eval_rows=4", "--dry-run")
    assert ran.code == 0, ran.err
    assert "4 rows held out for evaluation" in ran.out
    assert "evaluation rows are also training rows" in ran.out
    assert "weights make" not in ran.out
    ran = eleven.train("weighed", f"data.train=[{{path: {path}, weight: 0.5}}]", "--dry-run")
    assert "weights make 6 rows an epoch of 11" in ran.out or "weights make 5 rows an epoch of 11" in ran.out


def test_more_held_out_rows_than_there_are_is_refused(eleven):
    ran = eleven.train("none left", "data.eval_rows=11", "--dry-run")
    assert ran.code == 2
    assert "data.eval_rows is 11, and there are 11 rows in all: at most 10" in ran.err


def test_preference_pairs_are_refused_with_the_way_out(eleven):
    path = eleven.folder / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    ran = eleven.train("pairs", f"data.train=[{path}]", "--dry-run")
    assert ran.code == 2
    assert "not yet be trained on" in ran.err


def test_microbatches_of_unlike_numbers_of_rows_lose_no_row(eleven):
    outcome = eleven.train_well("drawn", "train.micro_batch_size=4", "train.gradient_accumulation_steps=2")
    assert sum(line["trained_tokens"] for line in outcome.steps) == trained_tokens(ROWS)
    assert [line["epoch"] for line in outcome.steps] == pytest.approx([8 / 11, 1], abs=1e-5)
