"""Faults end every thread, say one thing, and leave the last checkpoint whole and no half result."""

import errno
import re
import threading

import pytest
import torch
from support.recipes import WORDS, chats, tiny_tokenizer, watch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import rpft.train.checkpoint
from rpft.optim.adamw import AdamW


@pytest.fixture
def armed(monkeypatch):
    """Set when step 2 is reported, so with a checkpoint of step 1 there and steps to come."""
    event = threading.Event()
    watch(monkeypatch, lambda record: event.set() if record.step == 2 else None)
    return event


def check_fault(made, output, ran, said):
    assert ran.code == 1
    assert re.search(said, ran.err), ran.err
    assert len(ran.err.strip().splitlines()) == 3
    assert "rpft --debug train" in ran.err
    ours = [thread.name for thread in threading.enumerate() if re.match(r"cpu:|optimizer", thread.name)]
    assert ours == []
    outcome = made.outcome(output)
    assert not outcome.result
    assert "step-00000001" in outcome.checkpoints
    assert not list(outcome.folder.glob("*.partial"))


def check_resumes(made, output, expected):
    resumed = made.train_well(output, "--resume")
    assert resumed.numbers == expected.numbers
    assert resumed.result == expected.result


@pytest.fixture(scope="module")
def runs(project):
    sections = {"train": {"max_steps": 8}, "checkpoint": {"every_steps": 1, "keep_last": 9}}
    made = project("faults", "llama", sections=sections)
    return made, made.train_well("unbroken")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_in_a_worker_names_stage_microbatch_and_device(workers, runs, armed, monkeypatch):
    made, unbroken = runs
    forward = LlamaDecoderLayer.forward

    def failing(self, *arguments, **named):
        if armed.is_set():
            raise RuntimeError("the kernel gave up")
        return forward(self, *arguments, **named)

    output = f"worker of {workers}"
    with monkeypatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", failing)
        ran = made.train(output, f"engine.workers={workers}")
    place = r"cpu:\d compute: slot \d+ \(\w+ stage \[\d\.\.\d\]\) microbatch \d"
    check_fault(made, output, ran, f"{place} failed: RuntimeError: the kernel gave up")
    check_resumes(made, output, unbroken)


def test_an_exception_in_the_optimizer_names_the_step(runs, armed, monkeypatch):
    made, unbroken = runs
    update = AdamW.update

    def failing(self, *arguments, **named):
        if armed.is_set():
            raise ArithmeticError("no update")
        update(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "update", failing)
        ran = made.train("optimizer", "engine.workers=2")
    check_fault(made, "optimizer", ran, r"optimizer: the update of step \d failed: ArithmeticError: no update")
    check_resumes(made, "optimizer", unbroken)


def test_a_disk_full_in_mid_save_leaves_the_checkpoint_before(runs, armed, monkeypatch):
    made, unbroken = runs
    save = rpft.train.checkpoint.save_file
    written = []

    def failing(tensors, path):
        if armed.is_set():
            written.append(path)
            if len(written) == 3:
                path.write_bytes(b"half of")
                raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(rpft.train.checkpoint, "save_file", failing)
        ran = made.train("disk full")
    check_fault(made, "disk full", ran, "No space left on device")
    check_resumes(made, "disk full", unbroken)
    assert "step-00000002.partial" not in made.outcome("disk full").checkpoints


ODD = "~"
"""A token that stands in no other row; its embedding is 7e4, which float16 cannot hold and float32 can."""


def overflow(model):
    """Makes the embedding of ODD 7e4."""
    (token,) = tiny_tokenizer()(ODD).input_ids
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = 7e4


def rows_with_odd(places):
    rows = chats(24)
    for place in places:
        rows[place]["messages"][0]["content"] = f"{ODD} {WORDS[0]}"
    return rows


def test_an_overflow_in_float16_stops_after_three_skipped_steps_and_suggests_bfloat16(fresh):
    made = fresh("llama", rows=rows_with_odd(range(24)), change_model=overflow)
    ran = made.train("out", "model.dtype=float16", "train.max_steps=9", "checkpoint.every_steps=5")
    assert ran.code == 1
    assert "model.dtype=bfloat16" in ran.err
    outcome = made.outcome("out")  # which reads no NaN
    assert [line["skipped_steps"] for line in outcome.steps] == [1, 2, 3]
    assert outcome.losses == [None] * 3
    assert [line["grad_norm"] for line in outcome.steps] == [None] * 3
    assert not outcome.result
    assert outcome.checkpoints == []
    assert made.train("in float32", "train.max_steps=1").code == 0


def test_one_step_that_overflows_is_skipped_counted_and_leaves_no_trace(fresh):
    made = fresh("llama", rows=rows_with_odd([5]), change_model=overflow)
    words = ("model.dtype=float16", "train.max_steps=null", "train.num_epochs=1")
    outcome = made.train_well("out", *words)
    bad = [line["step"] for line in outcome.steps if line["loss"] is None]
    assert len(bad) == 1
    assert [line["skipped_steps"] for line in outcome.steps] == [int(step >= bad[0]) for step in range(1, 7)]
    assert all(loss is not None for loss in outcome.evaluations.values())
    again = made.train_well("saved", *words, "checkpoint.every_steps=5")
    assert (again.numbers, again.result) == (outcome.numbers, outcome.result)
    state = made.train_well("saved", *words, "--resume")
    assert (state.numbers, state.result) == (outcome.numbers, outcome.result)
