"""What must hold between keys of a recipe; what holds for one key alone stands in its section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rpft.recipe.sections.adapter import Adapter
from rpft.recipe.sections.checkpoint import Checkpoint
from rpft.recipe.sections.data import Data
from rpft.recipe.sections.engine import Engine
from rpft.recipe.sections.model import Model
from rpft.recipe.sections.train import Train


class Conflict(NamedTuple):
    """Keys that contradict each other: ``keys`` are dotted, the one to change first."""

    keys: tuple[str, ...]
    message: str


def find_conflicts(
    model: Model | None,
    data: Data | None,
    adapter: Adapter | None,
    train: Train | None,
    engine: Engine | None,
    checkpoint: Checkpoint | None,
    has_adapter: bool,
) -> Iterator[Conflict]:
    """Yield every contradiction between sections.

    A section is None when it has errors of its own: the checks that need it are left out.
    """
    if model and model.quantize != "none" and not has_adapter:
        yield Conflict(
            ("model.quantize", "adapter"),
            f"model.quantize is {model.quantize} and there is no adapter: quantised weights cannot be trained. Add"
            " an adapter section, or set model.quantize to none",
        )
    if engine and engine.host_store == "mmap" and not has_adapter:
        yield Conflict(
            ("engine.host_store", "adapter"),
            "engine.host_store is mmap and there is no adapter: every weight is trained, and only frozen ones can"
            " lie on the disk. Add an adapter section, or set engine.host_store to ram",
        )
    if data and data.eval and data.eval_fraction > 0:
        yield Conflict(
            ("data.eval_fraction", "data.eval"),
            "data.eval and data.eval_fraction are both set; keep one of them",
        )
    if data and data.eval_rows is not None and (data.eval or data.eval_fraction > 0):
        other = "data.eval" if data.eval else "data.eval_fraction"
        yield Conflict(("data.eval_rows", other), f"{other} and data.eval_rows are both set; keep one of them")
    if model and (model.rope_scaling.type == "config") != (model.rope_scaling.factor == 1):
        yield Conflict(
            ("model.rope_scaling.type", "model.rope_scaling.factor"),
            f"model.rope_scaling.type is {model.rope_scaling.type} and its factor {model.rope_scaling.factor:g};"
            " scaling needs a type, yarn or linear, and a factor above 1",
        )
    if adapter:
        yield from _adapter_conflicts(adapter)
    if model and adapter and model.quantize != "none" and adapter.dora:
        yield Conflict(
            ("adapter.dora", "model.quantize"),
            f"adapter.dora needs the lengths of weight rows, which model.quantize {model.quantize} does not hold;"
            " leave adapter.dora out, or set model.quantize to none",
        )
    if train:
        yield from _train_conflicts(train)
    if train and engine:
        yield from _round_conflicts(train, engine)
    if model and engine and engine.host_gradients == "bfloat16" and model.dtype != "bfloat16":
        yield Conflict(
            ("engine.host_gradients", "model.dtype"),
            f"engine.host_gradients is bfloat16 and model.dtype is {model.dtype}, whose gradients that would only"
            " round; set engine.host_gradients to auto or float32",
        )
    if data and not data.eval and data.eval_fraction == 0 and data.eval_rows is None:
        advice = "set data.eval, data.eval_fraction or data.eval_rows, or remove it"
        if train and train.eval_every is not None:
            yield Conflict(
                ("train.eval_every",),
                f"train.eval_every is set and there is nothing to evaluate on; {advice}",
            )
        if checkpoint and checkpoint.keep_best:
            yield Conflict(
                ("checkpoint.keep_best",),
                f"checkpoint.keep_best needs rows to evaluate on; {advice}",
            )
    if checkpoint and checkpoint.spike_deviations is not None and not checkpoint.regular:
        yield Conflict(
            ("checkpoint.spike_deviations",),
            "checkpoint.spike_deviations needs checkpoints to go back to; set checkpoint.every_steps or "
            "checkpoint.every_minutes, or remove it",
        )
    if train and checkpoint and checkpoint.keep_best and train.eval_every is None:
        yield Conflict(
            ("checkpoint.keep_best",),
            "checkpoint.keep_best needs train.eval_every, the steps between evaluations; set it, or "
            "remove keep_best",
        )


def _adapter_conflicts(adapter: Adapter) -> Iterator[Conflict]:
    if not adapter.target_modules and not adapter.target_parameters:
        yield Conflict(
            ("adapter.target_modules",),
            "adapter.target_modules is empty and so is adapter.target_parameters; name what gets an adapter, or"
            " set target_modules to all-linear",
        )
    for key, is_set in (("dropout", adapter.dropout > 0), ("dora", adapter.dora)):
        if adapter.target_parameters and is_set:
            yield Conflict(
                (f"adapter.{key}", "adapter.target_parameters"),
                f"adapter.{key} is set, which peft cannot do for the parameters of adapter.target_parameters;"
                f" leave out adapter.{key}, or target modules only",
            )


def _train_conflicts(train: Train) -> Iterator[Conflict]:
    if train.num_epochs is None and train.max_steps is None:
        yield Conflict(
            ("train.num_epochs", "train.max_steps"),
            "train.num_epochs and train.max_steps are both null, so training would not end; set one of them",
        )
    if train.lr_scheduler == "wsd" and train.warmup_ratio + train.decay_ratio > 1:
        yield Conflict(
            ("train.decay_ratio", "train.warmup_ratio"),
            f"train.warmup_ratio + train.decay_ratio is {train.warmup_ratio + train.decay_ratio:g}; "
            "with lr_scheduler wsd it must be at most 1",
        )


def _round_conflicts(train: Train, engine: Engine) -> Iterator[Conflict]:
    num_microbatches, steps = engine.num_microbatches, train.gradient_accumulation_steps
    if num_microbatches is None:
        return
    if steps % num_microbatches == 0:
        if engine.host_gradients == "bfloat16" and num_microbatches < steps and engine.plan is None:
            yield Conflict(
                ("engine.host_gradients", "engine.num_microbatches"),
                several_rounds(f"engine.num_microbatches is {num_microbatches}", steps),
            )
        return
    divisors = ", ".join(str(d) for d in range(1, min(steps, 1024) + 1) if steps % d == 0)
    yield Conflict(
        ("engine.num_microbatches", "train.gradient_accumulation_steps"),
        f"engine.num_microbatches is {num_microbatches} and does not divide "
        f"train.gradient_accumulation_steps, {steps}; possible values are {divisors}",
    )


def several_rounds(why: str, accumulation: int) -> str:
    """The message for gradients that would be rounded between rounds; ``why`` a step has more than one."""
    return (
        f"engine.host_gradients is bfloat16, which needs a step of one round; {why} and"
        f" train.gradient_accumulation_steps is {accumulation}. Set engine.num_microbatches to {accumulation}, or"
        " engine.host_gradients to auto or float32"
    )
