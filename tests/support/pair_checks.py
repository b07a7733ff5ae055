"""What must hold of a run, whatever its settings: on other workers, after trouble, beside plain transformers."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import rpft.train.prepare
import rpft.train.rows
from rpft.engine.compute import SlotRun
from rpft.engine.cpu import CpuDevice
from rpft.model import host_store, moments_file, token_chunks
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.one_pass import FusedPass
from rpft.train import samples, spikes
from rpft.train.job import read_scaled_config
from rpft.train.loop import Trainer
from rpft.train.prepare import Prepared
from support.covering import Row
from support.pairs import STEPS, words_of
from support.recipes import Outcome, Project, crash_at, run_rpft, watch

JUMP = 3
"""The step whose loss jumps, where that is the trouble."""

# -- what is seen of a run ---------------------------------------------------------------------------------


@dataclass
class Account:
    """What a run was planned to take, and what it took."""

    prepared: list[Prepared] = field(default_factory=list)
    host_bytes: int = 0
    peaks: list[int] = field(default_factory=list)


@contextmanager
def accounted(account: Account) -> Iterator[None]:
    """Notes in ``account`` what runs within take of host memory and of their workers'."""
    with pytest.MonkeyPatch.context() as patch:
        prepare, zeroed, run = rpft.train.prepare.prepare, host_store.zeroed_pages, Trainer.run

        def noted(*arguments: Any, **named: Any) -> Prepared:
            account.prepared.append(prepare(*arguments, **named))
            return account.prepared[-1]

        def counted(num_bytes: int) -> torch.Tensor:
            account.host_bytes += num_bytes
            return zeroed(num_bytes)

        def counted_for(device: CpuDevice, num_bytes: int) -> torch.Tensor:
            return counted(num_bytes)

        def running(trainer: Trainer, resume_from: Path | None) -> Path:
            account.host_bytes = 0
            folder = run(trainer, resume_from)
            account.peaks = [device.peak_bytes() for device in trainer._prepared.devices if device.peak_bytes()]
            return folder

        patch.setattr(rpft.train.prepare, "prepare", noted)
        patch.setattr(host_store, "zeroed_pages", counted)
        patch.setattr(CpuDevice, "allocate_host", counted_for)
        patch.setattr(Trainer, "run", running)
        yield


def check_account(account: Account, outcome: Outcome) -> None:
    """No part of the bill is under what the run took."""
    prepared = account.prepared[-1]
    bill = prepared.bill
    buffers = sum(
        size for part, size in bill.host_parts.items() if part not in ("process", "memory of the workers")
    )
    assert 0 < account.host_bytes <= buffers, (account.host_bytes, bill.host_parts)
    fixed = bill.device_parts["weight, gradient and hidden-state buffers"]
    fixed += bill.device_parts["frozen weights that stay"]
    assert max(account.peaks) <= fixed, (account.peaks, bill.device_parts)
    result = sum(len(content) for content in outcome.result.values())
    assert result <= bill.result
    for checkpoint in (outcome.folder / "checkpoints").iterdir():
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        assert size <= prepared.checkpoint_bytes, (size, prepared.checkpoint_bytes)


# -- what befalls a run ------------------------------------------------------------------------------------


def _jumping(patch: pytest.MonkeyPatch) -> None:
    """The loss of step JUMP is a hundred times what it is, and few steps say what is usual."""
    apply = HostOptimizer._apply

    def jumping(optimizer: HostOptimizer, update: Any) -> Any:
        result = apply(optimizer, update)
        return replace(result, loss_sum=100 * result.loss_sum) if result.step == JUMP else result

    patch.setattr(HostOptimizer, "_apply", jumping)
    patch.setattr(spikes, "_FEWEST", 2)


def _knowing(patch: pytest.MonkeyPatch) -> None:
    """Runs know from the start that they are to pass over step JUMP."""
    make = Trainer.__init__

    def knowing(trainer: Trainer, *arguments: Any) -> None:
        make(trainer, *arguments)
        trainer._state = replace(trainer._state, passed_over=[JUMP])

    patch.setattr(Trainer, "__init__", knowing)


def _short_of_memory(patch: pytest.MonkeyPatch, number: int) -> None:
    """A worker has no memory when it recomputes for the ``number``-th time."""
    recompute, calls = SlotRun.recompute, iter(range(1, 1 << 30))

    def failing(run: SlotRun, *arguments: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return recompute(run, *arguments)

    patch.setattr(SlotRun, "recompute", failing)


@contextmanager
def settings_of(row: Row) -> Iterator[None]:
    """What of a row is no key of a recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments_file, "PIECE_PARAMETERS", 4096)  # layers of tiny models have several
        patch.setattr(rpft.train.rows, "_FEW_LENGTHS", 2)  # each is traced anew in every life
        patch.setattr(samples, "MOST_NEW_TOKENS", 4)
        if row["pass"] == "torch":
            patch.setattr(rpft.train.prepare, "prepare_one_pass", lambda state, **_: FusedPass(state))
        if row["MLPs"] == "in parts":
            patch.setattr(token_chunks, "_MOST_BYTES", 0)
            patch.setattr(token_chunks, "num_parts", lambda tokens, width, itemsize: 3)
        yield


def broken_and_resumed(row: Row, made: Project, output: str, words: list[str], number: int) -> Outcome:
    """The run of a row on other workers and with delays, after whatever befalls it."""
    rng = random.Random(f"{number} trouble")
    first, then = (
        [f"engine.workers={rng.choice([2, 3])}", f"engine.inject_delays={rng.randrange(99)}"] for _ in "12"
    )
    with pytest.MonkeyPatch.context() as patch:
        if row["trouble"] == "memory":
            _short_of_memory(patch, rng.randint(1, 8))  # the fewest that there are
            ran = made.train(output, *words, *first)
            assert ran.code == 0, ran.err
            assert "is undone and done again with a smaller plan" in ran.out
            return made.outcome(output)
        if row["trouble"] == "spike":
            _jumping(patch)
            ran = made.train(output, *words, "checkpoint.spike_deviations=10", "checkpoint.spike_steps=1", *first)
            assert ran.code == 0, ran.err
            assert "will be passed over" in ran.out
            return made.outcome(output)
        if row["trouble"] == "crash":
            crash_at(3, patch)
            assert made.train(output, *words, *first).code == 1
        else:
            watch(patch, lambda record: os.kill(os.getpid(), signal.SIGINT) if record.step == 2 else None)
            ran = made.train(output, *words, *first)
            assert ran.code == 130, ran
    then += {"by stage": ["engine.recompute=layer"], "by layer": ["engine.recompute=stage"]}.get(row["plan"], [])
    return made.train_well(output, *words, *then, "--resume")


def saved(outcome: Outcome) -> dict[str, bytes]:
    """The tensors of the newest checkpoint."""
    folder = outcome.folder / "checkpoints" / outcome.checkpoints[-1]
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# -- what must hold ----------------------------------------------------------------------------------------


def check(row: Row, made: Project, number: int) -> None:
    """Runs the recipe of ``row`` twice, once in peace, and asks what it left. ``number``: see ``words_of``."""
    words, account = words_of(row, made, number), Account()
    every = "checkpoint.every_steps=2"
    with settings_of(row):
        with pytest.MonkeyPatch.context() as patch, accounted(account):
            if row["trouble"] == "spike":
                _knowing(patch)
            plain = made.train_well(f"{number}-plain", *words, every, "engine.workers=1")
        losses = [loss for loss in plain.losses if loss is not None]
        assert len(plain.losses) == STEPS
        assert len(losses) == STEPS - (row["trouble"] == "spike")
        assert all(math.isfinite(loss) for loss in losses)
        assert plain.steps[-1]["skipped_steps"] == (row["trouble"] == "spike")
        check_account(account, plain)
        check_first_step(row, account.prepared[-1], plain)
        varied = broken_and_resumed(row, made, f"{number}-varied", [*words, every], number)
        assert varied.numbers == plain.numbers
        assert varied.result == plain.result
        assert saved(varied) == saved(plain)
        check_what_is_left(row, account.prepared[-1], plain)
    for outcome in (plain, varied):
        shutil.rmtree(outcome.folder)


def did(*words: Any) -> str:
    """What `rpft WORDS...` prints, which must end well."""
    ran = run_rpft(*words)
    assert ran.code == 0, (words, ran.err)
    return ran.out


_CLOSE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative: loss of the exported model by transformers against the last evaluation."""


def check_what_is_left(row: Row, prepared: Prepared, outcome: Outcome) -> None:
    """The run's result is exported and answers; in transformers it has the loss that the run ended with."""
    run, folder = outcome.folder, outcome.folder / "exported"
    did("export", run, "--out", folder)
    did("export", run, "--out", run / "from checkpoint", "--checkpoint", f"step-{STEPS:08d}")
    # An adapter is rounded where masters are not; and bfloat16 masters in halves round ties away from zero.
    if row["dtype"] == "float32" or (row["adapter"], row["dtype"]) == ("none", "float16"):
        files = [sorted(path.glob("*.safetensors")) for path in (folder, run / "from checkpoint")]
        finished, saved_last = ([file.read_bytes() for file in each] for each in files)
        assert finished == saved_last
    if row["adapter"] != "none":
        did("export", run, "--out", run / "alone", "--adapter-only")
    if row["evaluation"] == "keeps the best":
        did("export", run, "--out", run / "best", "--checkpoint", "best")
    assert json.loads(did("generate", run, "the answer is", "--max-new-tokens", "4", "--json"))["tokens"] >= 1
    did("report", run, "--samples")
    if row["evaluation"] == "none" or row["quantize"] != "none":
        return
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, row["dtype"]), attn_implementation="eager"
    ).eval()
    assert prepared.data.eval is not None
    with torch.no_grad():
        total, count = plain_loss(model, prepared.data.eval.rows)
    assert total.item() / count == pytest.approx(outcome.evaluations[STEPS], rel=_CLOSE[row["dtype"]])


def check_first_step(row: Row, prepared: Prepared, outcome: Outcome) -> None:
    """The first step, before anything is learnt, has the loss and gradient of its rows in plain transformers.

    There each row stands by itself, in whatever packs and microbatches it is here. Not asked of a quantised base,
    nor of dropout.
    """
    if row["quantize"] != "none" or row["family"] == "gpt2":
        return
    base = prepared.checkpoint.folder
    model: Any = AutoModelForCausalLM.from_pretrained(
        base,
        config=read_scaled_config(prepared.recipe, base),
        dtype=getattr(torch, row["dtype"]),
        attn_implementation="eager",
    )
    data, first = prepared.data, outcome.steps[0]
    rows = [data.train.rows[index] for item in data.order.items(0) for index in data.items[item]]
    total, count = plain_loss(model, rows)
    assert first["trained_tokens"] == count
    if row["adapter"] != "rsLoRA, dropout":
        assert first["loss"] == pytest.approx(total.item() / count, rel=_CLOSE[row["dtype"]])
    if row["adapter"] == "none" and row["dtype"] == "float32" and row["router loss"] == "0":
        (total / count).backward()
        squares = [p.grad.square().sum().item() for p in model.parameters() if p.grad is not None]
        assert first["grad_norm"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-4)


def plain_loss(model: Any, rows: Any) -> tuple[torch.Tensor, int]:
    """The sum of the loss over ``rows``, one after the other through ``model``, and the tokens that it counts."""
    total, count = torch.zeros(()), 0
    for each in rows:
        ids = torch.tensor(each.ids, dtype=torch.long)[None]
        targets = torch.where(torch.tensor(each.trained), ids[0], -100)[1:]
        logits = model(input_ids=ids).logits[0, :-1].float()
        total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets >= 0).sum())
    return total, count
