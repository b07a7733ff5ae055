"""What a recipe makes of its model: config, skeleton, adapter, quantised weights, layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.cut_experts import cut_experts
from rpft.model.layers import build_layers
from rpft.model.positions import scale_positions
from rpft.model.quant_choice import quantize_base
from rpft.model.router_loss import chosen_coefficient
from rpft.model.verify import verify_packing
from rpft.recipe.schema import Recipe
from rpft.recipe.sections.adapter import Adapter


def read_scaled_config(recipe: Recipe, folder: Path) -> Any:
    """The config in ``folder`` with the positions that the recipe asks for."""
    config, scaling = read_config(folder), recipe.model.rope_scaling
    if scaling.type != "config":
        scale_positions(config, scaling.type, scaling.factor)
    return config


def lora_settings(adapter: Adapter) -> LoraSettings:
    """The adapter that a recipe describes."""
    targets = adapter.target_modules
    return LoraSettings(
        adapter.r,
        adapter.alpha,
        adapter.dropout,
        targets if isinstance(targets, str) else list(targets),
        adapter.rslora,
        adapter.dora,
        adapter.modules_to_save,
        adapter.target_parameters,
    )


def model_keys(recipe: Recipe) -> tuple[Any, ...]:
    """What of ``recipe`` decides ``model_parts``, beside packing."""
    return recipe.model, recipe.adapter, recipe.train.router_aux_loss


def model_parts(recipe: Recipe, config: Any, checkpoint: Checkpoint, expert_groups: int = 1) -> dict[str, Any]:
    """Those fields of a Job that model and adapter decide, and in how many layers of their own experts are."""
    dtype = getattr(torch, recipe.model.dtype)
    skeleton = cut(build_model(copy.deepcopy(config), dtype, recipe.model.attention))  # building changes it
    skeleton.router_loss = chosen_coefficient(recipe.train.router_aux_loss, skeleton.model.config)
    if recipe.data.packing:
        verify_packing(skeleton, dtype)
    peft_model = None
    if recipe.adapter is not None:
        peft_model = inject_lora(skeleton, lora_settings(recipe.adapter), recipe.model.path)
    if recipe.model.quantize != "none":
        stored = checkpoint.stored if checkpoint.stored.weights and recipe.model.quantize == "nf4" else None
        quantize_base(
            skeleton,
            recipe.model.quantize,
            dtype,
            only=stored and stored.weights,
            nested=stored is None or stored.nested,
        )
    skeleton = cut_experts(skeleton, expert_groups, dtype)
    layouts = build_layers(skeleton, dtype)
    return {"skeleton": skeleton, "peft_model": peft_model, "layouts": layouts, "dtype": dtype}
