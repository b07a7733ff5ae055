"""From a recipe to everything that a run needs, short of the weights. What can be refused is refused here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.engine.device import Device, make_pool
from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.checkpoint import Checkpoint, read_config, resolve_checkpoint
from rpft.model.functions import LayerFunctions
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton, build_model, cut, has_dropout
from rpft.model.verify import verify_packing
from rpft.optim.one_pass import FusedPass, OnePass, measured_rate
from rpft.optim.one_pass import prepare as prepare_one_pass
from rpft.plan.bill import (
    Bill,
    Workload,
    available_host_bytes,
    make_bill,
    refuse_unless_fits,
)
from rpft.plan.choose import choose_plan, model_shape
from rpft.plan.partition import choose_num_microbatches
from rpft.plan.plan import Plan, read_plan
from rpft.plan.profile import LayerProfile, measure_layers, measure_link
from rpft.plan.simulate import ASSUMED_RATES, Rates
from rpft.recipe.schema import Engine, Recipe
from rpft.train.kernels import KernelChoice, choose_gradient_dtype, choose_kernels
from rpft.train.rows import PAD_TO_MULTIPLE, RunData, load_data

Say = Callable[[str], None]
"""Takes a line for the person who waits."""


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
    gradient_dtype: torch.dtype
    """Of the host gradients."""
    devices: list[Device]
    kernels: KernelChoice
    functions: list[LayerFunctions]
    """What runs the layers, one a device."""
    one_pass: OnePass
    """What updates the layers."""
    whole_masters: bool
    """As of the host store."""
    profiles: list[LayerProfile] | None
    """What each layer takes; None where nothing was measured."""
    data: RunData
    plan: Plan
    bill: Bill


def prepare(recipe: Recipe, say: Say = lambda line: None) -> Prepared:
    """Reads config, tokenizer and data, builds skeleton and plan, checks memory; UserError where it fails."""
    folder = resolve_checkpoint(recipe.model.path, recipe.model.revision)
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    devices = _pool(recipe.engine)
    kernels = choose_kernels(recipe.engine.kernels, devices[0].torch_device.type)
    dtype = getattr(torch, recipe.model.dtype)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    data = load_data(recipe, folder, kernels.graphs, positions)
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
    given = _given_plan(recipe, len(layouts))
    num_microbatches, gradient_dtype = _rounds(recipe, given, dtype)
    deterministic = recipe.engine.deterministic
    functions = [LayerFunctions(skeleton, d.torch_device, dtype, kernels.kind, deterministic) for d in devices]
    shape = model_shape(skeleton.model.config, dtype.itemsize)
    profiles = None
    if kernels.graphs and devices[0].torch_device.type == "cuda":
        rows = recipe.train.micro_batch_size
        dropout, packed = has_dropout(skeleton.model), recipe.data.packing
        profiles = measure(functions[0], layouts, shape.vocab_size, rows, data.longest, dropout, packed, say)
    one_pass = prepare_one_pass(num_threads=recipe.engine.cpu_threads)
    delayed = recipe.optimizer.update == "delayed"
    # torch's fused kernel wants whole masters: it would have to join and split what lies in two halves.
    whole_masters = isinstance(one_pass, FusedPass)
    work = Workload(
        shape,
        recipe.train.micro_batch_size * data.longest,
        recipe.train.gradient_accumulation_steps,
        delayed,
        kernels.kind,
        gradient_dtype,
        profiles,
        whole_masters,
    )
    vram = min((b for b in (device.memory_bytes() for device in devices) if b is not None), default=None)
    ram = recipe.engine.ram_limit or available_host_bytes()
    rates = ASSUMED_RATES if profiles is None else _rates(devices[0], recipe.engine.emulate_link_gbps, one_pass)
    plan = given or choose_plan(
        layouts, skeleton, work, len(devices), num_microbatches, recipe.engine.recompute, vram, ram, rates
    )
    bill = make_bill(plan, layouts, work)
    refuse_unless_fits(bill, ram, vram)
    return Prepared(
        recipe,
        checkpoint,
        config,
        skeleton,
        peft_model,
        layouts,
        dtype,
        gradient_dtype,
        devices,
        kernels,
        functions,
        one_pass,
        whole_masters,
        profiles,
        data,
        plan,
        bill,
    )


def _rates(device: Device, emulated_gbps: float | None, one_pass: OnePass) -> Rates:
    """The link as measured, or as emulated, and the optimizer as measured."""
    up, down = measure_link(device.torch_device, device.allocate_host)
    if emulated_gbps is not None:
        up, down = min(up, emulated_gbps * 1e9), min(down, emulated_gbps * 1e9)
    return Rates(up, down, measured_rate(one_pass))


def _pool(settings: Engine) -> list[Device]:
    devices = make_pool(settings.device, settings.workers, settings.vram_limit, settings.emulate_link_gbps)
    if settings.emulate_link_gbps is not None and devices[0].torch_device.type == "cpu":
        auto = ", and no GPU is found," if settings.device == "auto" else ""
        raise UserError(
            f"engine.emulate_link_gbps slows down the link of a GPU; engine.device is {settings.device}{auto} and"
            " the CPU pool has no link. Set engine.emulate_link_gbps to null"
        )
    return devices


def _given_plan(recipe: Recipe, num_layers: int) -> Plan | None:
    """The plan of ``engine.plan``; UserError where it is not one for this model."""
    path = recipe.engine.plan
    if path is None:
        return None
    plan = read_plan(Path(path))
    try:
        plan.check(num_layers)
    except UserError as error:
        raise UserError(f"engine.plan {path} does not fit {recipe.model.path}: {error}") from None
    return plan


def _rounds(recipe: Recipe, given: Plan | None, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(microbatches of a round, precision of the host gradients)."""
    settings, accumulation = recipe.engine, recipe.train.gradient_accumulation_steps
    if given is not None:
        size, reason = given.num_microbatches, f"num_microbatches of engine.plan {settings.plan} is"
    elif settings.num_microbatches is not None:
        size, reason = settings.num_microbatches, "engine.num_microbatches is"
    else:
        size, reason = choose_num_microbatches(accumulation), "for engine.num_microbatches the planner chose"
    return size, choose_gradient_dtype(settings.host_gradients, dtype, size, accumulation, reason)


def measure(
    functions: LayerFunctions,
    layouts: list[LayerLayout],
    vocabulary: int,
    rows: int,
    sequence: int,
    dropout: bool,
    packed: bool,
    say: Say,
) -> list[LayerProfile]:
    """A profile a layer at the largest shape of a microbatch; UserError where one layer alone is too much."""
    device = functions.device
    say(f"measuring the layers with {rows} x {sequence} tokens on {device}; they are compiled for it first")
    try:
        return measure_layers(functions, layouts, rows, sequence, vocabulary, dropout=dropout, packed=packed)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a single layer with a microbatch of {rows} x {sequence} tokens needs more memory than {device} has"
            " or engine.vram_limit allows. Less is needed with a smaller train.micro_batch_size or"
            f" data.max_seq_len ({str(error).splitlines()[0]})"
        ) from error
