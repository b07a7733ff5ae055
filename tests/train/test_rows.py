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
