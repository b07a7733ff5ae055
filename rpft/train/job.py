"""What a recipe makes of its model and its data, before any device is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.checkpoint import Checkpoint, resolve_checkpoint
from rpft.model.cut_experts import ever_more_groups
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.moments import StateFormat
from rpft.model.positions import can_be_scaled
from rpft.model.skeleton import Skeleton, has_dropout
from rpft.plan.bill import Workload
from rpft.plan.choose import model_shape
from rpft.plan.count import Microbatch, count_layers
from rpft.plan.estimate import ModelShape
from rpft.plan.plan import Plan
from rpft.plan.profile import LayerProfile
from rpft.plan.rounds import choose_num_microbatches
from rpft.plan.sizes import bytes_alone
from rpft.recipe.schema import Recipe
from rpft.train.given_plan import about_given, given_plan
from rpft.train.kernels import KernelChoice, choose_gradient_dtype
from rpft.train.model_parts import model_keys, model_parts, read_scaled_config
from rpft.train.rows import PAD_TO_MULTIPLE, RunData, load_data

_STEPS_SAMPLED = 4
"""Whose microbatches say how long lines are on average."""


@dataclass
class Job:
    """A run but for the machine that it is for."""

    recipe: Recipe
    checkpoint: Checkpoint
    config: Any
    """The checkpoint's config as it stands in its file."""
    skeleton: Skeleton
    peft_model: Any | None
    layouts: list[LayerLayout]
    dtype: torch.dtype
    kernels: KernelChoice
    data: RunData
    given: Plan | None
    """The plan of ``engine.plan``."""
    num_microbatches: int
    """Of a round."""
    gradient_dtype: torch.dtype
    """Of the host gradients."""
    open_rows: bool
    """Whether the planner chooses the rows of a microbatch; until then it has one."""

    @property
    def delayed(self) -> bool:
        return self.recipe.optimizer.update == "delayed"

    @property
    def on_disk(self) -> bool:
        """Whether frozen weights lie in a file and not in RAM. Of ``auto`` not, until a plan needs it."""
        return self.recipe.engine.host_store == "mmap"

    @property
    def state_format(self) -> StateFormat:
        """Of the moments."""
        return self.recipe.optimizer.state

    @property
    def offload(self) -> Path | None:
        """The folder in which moments lie; None for RAM."""
        folder = self.recipe.optimizer.offload
        return None if folder is None else Path(folder)

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.skeleton.model.config, self.dtype.itemsize)

    @property
    def has_dropout(self) -> bool:
        return has_dropout(self.skeleton.model)

    @property
    def rows(self) -> int:
        """Lines of a microbatch."""
        return self.recipe.train.microbatch_rows

    @property
    def max_tokens(self) -> int:
        """Of the largest microbatch, padding included."""
        return self.rows * self.data.longest

    @property
    def rounds(self) -> int:
        """Of a step."""
        return -(-self.recipe.train.gradient_accumulation_steps // self.num_microbatches)

    def workload(
        self,
        profiles: Sequence[LayerProfile] | None,
        whole_masters: bool = False,
        workers_in_ram: int = 0,
        num_workers: int = 0,
    ) -> Workload:
        """What decides the memory of this run; of GPUs' layers whose bytes are not measured are counted."""
        return Workload(
            self.shape,
            self.max_tokens,
            self.recipe.train.gradient_accumulation_steps,
            self.delayed,
            self.kernels.kind,
            self.gradient_dtype,
            profiles,
            None if workers_in_ram else self.counted_layers,
            whole_masters,
            workers_in_ram,
            num_workers if self.on_disk else 0,
            self.state_format,
            self.offload is not None,
        )

    def counted_layers(self) -> list[LayerProfile]:
        """The bytes of each layer with the largest microbatch on a GPU."""
        packing = self.recipe.data.packing
        batch = Microbatch(
            self.rows,
            self.data.longest,
            self.shape,
            self.dtype,
            self.kernels.kind,
            row_tokens=self.data.typical_row_tokens if packing else None,
            varlen=packing and self.recipe.model.attention == "auto",
            dropout=self.has_dropout,
        )
        return count_layers(self.skeleton, self.layouts, batch)

    def parts(self) -> dict[str, Any]:
        """The fields of a Job, of this one or of what is made from one."""
        return {field.name: getattr(self, field.name) for field in fields(Job)}

    def mean_step(self) -> tuple[float, float]:
        """(Tokens of a microbatch, padding included; tokens of a step without), mean over the first steps."""
        steps = [self.data.step(n) for n in range(1, min(_STEPS_SAMPLED, self.data.order.num_steps) + 1)]
        batches = [batch for step in steps for batch in step]
        padded = sum(batch.input_ids.numel() for batch in batches) / len(batches)
        return padded, sum(batch.tokens for batch in batches) / len(steps)

    def with_recipe(self, recipe: Recipe, longest: int | None = None) -> Job:
        """This job with a changed recipe, planned anew; its rows stay, or are cut to ``longest`` tokens.

        UserError where the change contradicts something else.
        """
        base = Job(**self.parts())
        if model_keys(recipe) != model_keys(self.recipe):
            groups = self.skeleton.num_groups
            base = replace(base, **model_parts(recipe, self.config, self.checkpoint, groups))
        data = replace(self.data, micro_batch_size=recipe.train.microbatch_rows)
        if longest is not None:
            data = replace(data, pad_lengths=[longest])
        num_microbatches, gradient_dtype = _rounds(recipe, None, base.dtype)
        return replace(
            base,
            recipe=recipe,
            data=data,
            given=None,
            num_microbatches=num_microbatches,
            gradient_dtype=gradient_dtype,
        )

    def with_rows(self, rows: int) -> Job:
        """This job with a step's rows in microbatches of ``rows``; UserError where that contradicts its rounds."""
        job = self.with_recipe(divide_rows(self.recipe, rows))
        accumulation, in_round = job.recipe.train.gradient_accumulation_steps, job.num_microbatches
        if accumulation % in_round:
            raise UserError(f"rounds of {in_round} microbatches do not divide {accumulation}")
        return job

    def in_expert_groups(self) -> Iterator[Job]:
        """This job with the experts of a block in ever more layers of their own, where they can be.

        The last time these take less memory than another layer, so that more of them would be of no use.
        """
        for skeleton in ever_more_groups(self.skeleton, self.dtype):
            layouts = build_layers(skeleton, self.dtype)
            yield replace(Job(**self.parts()), skeleton=skeleton, layouts=layouts)
            groups = [layout for layout in layouts if layout.experts is not None]
            others = [layout for layout in layouts if layout.experts is None]
            dtype = self.gradient_dtype
            largest = [max(bytes_alone(layout, dtype) for layout in each) for each in (groups, others)]
            if largest[0] <= largest[1]:
                return

    def with_frozen_on_disk(self) -> Job:
        """This job with frozen weights in a file."""
        return replace(Job(**self.parts()), recipe=self.recipe.with_values("engine", host_store="mmap"))

    def with_rounds(self, num_microbatches: int) -> Job:
        """This job with so many microbatches a round; UserError where host gradients cannot be as it says."""
        train, settings = self.recipe.train, self.recipe.engine
        gradient_dtype = choose_gradient_dtype(
            settings.host_gradients,
            self.dtype,
            num_microbatches,
            train.gradient_accumulation_steps,
            "a round has",
        )
        return replace(Job(**self.parts()), num_microbatches=num_microbatches, gradient_dtype=gradient_dtype)


def divide_rows(recipe: Recipe, rows: int) -> Recipe:
    """``recipe`` with as many rows a step as before, in microbatches of ``rows``, which must divide them."""
    train = recipe.train
    in_step = train.microbatch_rows * train.gradient_accumulation_steps
    assert in_step % rows == 0
    return recipe.with_values("train", micro_batch_size=rows, gradient_accumulation_steps=in_step // rows)


def read_job(recipe: Recipe, kernels: KernelChoice, weights: bool = True) -> Job:
    """Reads config, tokenizer and data and builds the skeleton; UserError where the recipe asks for too much.

    ``weights``: whether they will be read; else the checkpoint may have none.
    """
    open_rows = recipe.train.micro_batch_size == "auto"
    if open_rows:
        said = about_given(recipe).get("micro_batch_size", 1)
        in_step = recipe.train.gradient_accumulation_steps
        recipe = divide_rows(recipe, said if in_step % said == 0 else 1)
    folder = resolve_checkpoint(recipe.model.path, recipe.model.revision, weights)
    config = read_scaled_config(recipe, folder)
    checkpoint = Checkpoint(folder, weights)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    data = load_data(recipe, folder, kernels.graphs, positions)
    if positions is not None and data.longest > positions:
        more = ""
        if can_be_scaled(config):
            factor = -(-data.longest // positions)
            more = f", or scale its positions: model.rope_scaling.type=yarn model.rope_scaling.factor={factor}"
        raise UserError(
            f"the longest row has {data.longest} tokens with padding, the model has {positions} positions;"
            f" set data.max_seq_len to at most {positions - positions % PAD_TO_MULTIPLE}{more}"
        )
    parts = model_parts(recipe, config, checkpoint, about_given(recipe).get("expert_groups", 1))
    given = given_plan(recipe, parts["skeleton"], len(parts["layouts"]))
    num_microbatches, gradient_dtype = _rounds(recipe, given, parts["dtype"])
    return Job(
        recipe=recipe,
        checkpoint=checkpoint,
        config=config,
        kernels=kernels,
        data=data,
        given=given,
        num_microbatches=num_microbatches,
        gradient_dtype=gradient_dtype,
        open_rows=open_rows,
        **parts,
    )


def _rounds(recipe: Recipe, given: Plan | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(microbatches of a round, precision of the host gradients)."""
    settings, accumulation = recipe.engine, recipe.train.gradient_accumulation_steps
    if given is not None:
        size, reason = given.num_microbatches, f"num_microbatches of engine.plan {settings.plan} is"
    elif settings.num_microbatches is not None:
        size, reason = settings.num_microbatches, "engine.num_microbatches is"
    elif settings.host_gradients == "bfloat16":
        size, reason = accumulation, ""
    else:
        size, reason = choose_num_microbatches(accumulation), ""
    return size, choose_gradient_dtype(settings.host_gradients, dtype, size, accumulation, reason)
