"""Faults end every thread, say one thing, and leave the last checkpoint whole and no half result."""

import errno
import json
import mmap
import os
import re
import resource
import shlex
import threading

import pytest
import torch
from support.recipes import WORDS, chats, tiny_tokenizer, watch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import rpft.train.loop
from rpft import files
from rpft.engine.failure import Failure
from rpft.optim.adamw import LayerUpdate
from rpft.train.faults import exit_code


@pytest.fixture
def armed(monkeypatch):
    """Set when step 2 is reported, so with a checkpoint of step 1 there and steps to come."""
    event = threading.Event()
    watch(monkeypatch, lambda record: event.set() if record.step == 2 else None)
    return event


def check_fault(made, output, ran, said, code=1):
    assert ran.code == code
    assert re.search(said, ran.err), ran.err
    assert len(ran.err.strip().splitlines()) == 4
    assert re.search(r"step \d is the last that was finished, the last checkpoint is .*/step-\d+\.", ran.err)
    words = shlex.join(["rpft", "train", str(made.recipe), f"output_dir={made.folder / output}"])
    assert f"To go on: {words}" in ran.err
    assert "rpft --debug train" in ran.err
    assert ran.err.strip().endswith("--resume"), "without it the same run is refused"
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


def test_a_layer_that_never_ends_is_reported_with_who_waits_for_it(runs, armed, monkeypatch):
    made, unbroken = runs
    forward, fail = LlamaDecoderLayer.forward, Failure.set
    seen = threading.Event()

    def stuck(self, *arguments, **named):
        if armed.is_set():
            seen.wait(60)
        return forward(self, *arguments, **named)

    def failed(self, error):
        fail(self, error)
        seen.set()

    with monkeypatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", stuck)
        patch.setattr(Failure, "set", failed)
        ran = made.train("stuck", "engine.stall_seconds=1", "engine.workers=2")
    said = r"no progress for 1 seconds \(engine.stall_seconds\) in step \d\. At work: .*cpu:\d compute: slot"
    check_fault(made, "stuck", ran, said, code=4)
    check_resumes(made, "stuck", unbroken)


def test_memory_that_runs_out_has_an_exit_code_of_its_own(runs, armed, monkeypatch):
    made, _ = runs
    forward = LlamaDecoderLayer.forward

    def failing(self, *arguments, **named):
        if armed.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", failing)
        ran = made.train("memory")
    check_fault(made, "memory", ran, "microbatch .* OutOfMemoryError: CUDA out of memory", code=3)


@pytest.mark.parametrize(
    "take", [lambda: torch.empty(1 << 58), lambda: mmap.mmap(-1, 1 << 60)], ids=["torch", "map"]
)
def test_a_host_without_memory_is_told_from_other_faults_whoever_asked_for_it(take):
    with pytest.raises((RuntimeError, OSError)) as caught:
        take()
    assert exit_code(caught.value) == 3


def test_an_exception_in_the_optimizer_names_the_step(runs, armed, monkeypatch):
    made, unbroken = runs
    update = LayerUpdate.__call__

    def failing(self, *arguments, **named):
        if armed.is_set():
            raise ArithmeticError("no update")
        update(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(LayerUpdate, "__call__", failing)
        ran = made.train("optimizer", "engine.workers=2")
    check_fault(made, "optimizer", ran, r"optimizer: the update of step \d failed: ArithmeticError: no update")
    check_resumes(made, "optimizer", unbroken)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before_and_ends_the_run_at_the_third_save(
    number, runs, armed, monkeypatch
):
    made, unbroken = runs
    write = files.write
    output = f"disk {number}"

    def failing(file, data):
        if armed.is_set() and file.name.endswith("layer-00003.safetensors"):
            write(file, data[: len(data) // 2])
            raise OSError(number, os.strerror(number))
        write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", failing)
        ran = made.train(output)
    check_fault(made, output, ran, os.strerror(number), code=5)
    assert ran.out.count("could not be saved") == 2
    check_resumes(made, output, unbroken)
    assert not [name for name in made.outcome(output).checkpoints if name.endswith(".partial")]


def test_a_save_that_fails_once_is_said_and_the_run_goes_on(runs, monkeypatch):
    made, unbroken = runs
    rename = files.rename
    failed = []

    def failing(source, target):
        if target.name == "step-00000003" and not failed:
            failed.append(target)
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", failing)
        ran = made.train("once")
    assert ran.code == 0
    assert "step 3 could not be saved" in ran.out
    outcome = made.outcome("once")
    assert outcome.checkpoints == [f"step-0000000{step}" for step in (1, 2, 4, 5, 6, 7, 8)]
    assert (outcome.numbers, outcome.result) == (unbroken.numbers, unbroken.result)


def test_a_disk_that_does_not_take_the_result_has_its_exit_code_and_going_on_writes_it(runs, monkeypatch):
    made, unbroken = runs
    save_result = rpft.train.loop.save_result

    def without_room(*arguments):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save_result(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr("rpft.train.loop.save_result", without_room)
        ran = made.train("no result")
    assert ran.code == 5
    assert "step 8 is the last that was finished" in ran.err
    assert os.strerror(errno.EFBIG) in ran.err
    check_resumes(made, "no result", unbroken)


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
    assert ran.code == 6
    assert "model.dtype=bfloat16" in ran.err
    outcome = made.outcome("out")  # which reads no NaN
    assert [line["skipped_steps"] for line in outcome.steps] == [1, 2, 3]
    assert outcome.losses == [None] * 3
    assert [line["grad_norm"] for line in outcome.steps] == [None] * 3
    assert not outcome.result
    assert outcome.checkpoints == []
    kept = [json.loads(file.read_text()) for file in sorted((outcome.folder / "not_finite").iterdir())]
    assert [batch["step"] for batch in kept] == [1, 2, 3]
    assert all(ODD in text for batch in kept for micro in batch["microbatches"] for text in micro["text"])
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
