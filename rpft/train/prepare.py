"""From a recipe to everything that a run needs, short of the weights. What can be refused is refused here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.engine.device import Device, make_pool
from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.checkpoint import Checkpoint, read_config, resolve_checkpoint
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton, build_model, cut
from rpft.model.verify import verify_packing
from rpft.plan.bill import (
    Bill,
    Workload,
    available_host_bytes,
    make_bill,
    refuse_unless_fits,
    refuse_unless_stored,
)
from rpft.plan.choose import choose_plan, model_shape
from rpft.plan.partition import choose_num_microbatches
from rpft.plan.plan import Plan, read_plan
from rpft.recipe.schema import Recipe
from rpft.train.rows import PAD_TO_MULTIPLE, RunData, load_data


@dataclass
class Prepared:
    """A run, ready to load its weights."""

    recipe: Recipe
    checkpoint: Checkpoint
    config: Any
    """The checkpoint's config as it stands in its file."""
    skeleton: Skeleton
    peft_model: Any | None
    layouts: list[LayerLayout]
    dtype: torch.dtype
    devices: list[Device]
    data: RunData
    plan: Plan
    bill: Bill


def prepare(recipe: Recipe) -> Prepared:
    """Reads config, tokenizer and data, builds skeleton and plan, checks memory; UserError where it fails."""
    folder = resolve_checkpoint(recipe.model.path, recipe.model.revision)
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    devices = make_pool(recipe.engine.device, recipe.engine.workers, recipe.engine.vram_limit)
    dtype = getattr(torch, recipe.model.dtype)
    data = load_data(recipe, folder)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and data.longest > positions:
        raise UserError(
            f"the longest row has {data.longest} tokens with padding, the model has {positions} positions;"
            f" set data.max_seq_len to at most {positions - positions % PAD_TO_MULTIPLE}"
        )
    skeleton = cut(build_model(copy.deepcopy(config), dtype, recipe.model.attention))  # building changes it
    if recipe.data.packing:
        verify_packing(skeleton, dtype)
    peft_model = None
    if recipe.adapter is not None:
        adapter = recipe.adapter
        targets = adapter.target_modules
        settings = LoraSettings(
            adapter.r, adapter.alpha, adapter.dropout, targets if isinstance(targets, str) else list(targets)
        )
        peft_model = inject_lora(skeleton, settings, recipe.model.path)
    layouts = build_layers(skeleton, dtype)
    plan, bill = _plan(recipe, skeleton, layouts, devices, data.longest, dtype)
    return Prepared(recipe, checkpoint, config, skeleton, peft_model, layouts, dtype, devices, data, plan, bill)


def _plan(
    recipe: Recipe,
    skeleton: Skeleton,
    layouts: list[LayerLayout],
    devices: list[Device],
    longest: int,
    dtype: torch.dtype,
) -> tuple[Plan, Bill]:
    """The plan that the recipe names, or the one that suits; refused where RAM, VRAM or disk will not do."""
    settings, train = recipe.engine, recipe.train
    work = Workload(
        model_shape(skeleton.model.config, dtype.itemsize),
        train.micro_batch_size * longest,
        train.gradient_accumulation_steps,
        recipe.optimizer.update == "delayed",
    )
    vram = min((b for b in (device.memory_bytes() for device in devices) if b is not None), default=None)
    if settings.plan is not None:
        plan = read_plan(Path(settings.plan))
        try:
            plan.check(len(layouts))
        except UserError as error:
            raise UserError(f"engine.plan {settings.plan} does not fit {recipe.model.path}: {error}") from None
    else:
        size = settings.num_microbatches or choose_num_microbatches(work.accumulation)
        plan = choose_plan(layouts, skeleton, work, len(devices), size, settings.recompute, vram)
    bill = make_bill(plan, layouts, work)
    refuse_unless_fits(bill, settings.ram_limit or available_host_bytes(), vram)
    refuse_unless_stored(bill, Path(recipe.output_dir))
    return plan, bill
