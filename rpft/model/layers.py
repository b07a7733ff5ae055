"""From a skeleton to the list of layers: which tensors each owns, which it borrows, which are trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.layout import Borrow, LayerLayout, TensorSpec, build_layouts
from rpft.model.parts import Part, is_parameter_adapter
from rpft.model.quant import PackedWeight
from rpft.model.skeleton import Skeleton, persistent_buffers
from rpft.model.slices import ExpertSlice


def layer_names(skeleton: Skeleton) -> list[str]:
    """A short name a layer, for messages: embedding, block 0 ..., head."""
    return ["embedding", *(f"block {part.block}{part.mark}" for part in skeleton.parts), "head"]


def build_layers(skeleton: Skeleton, dtype: torch.dtype) -> list[LayerLayout]:
    """The layouts of embedding, blocks and head. A parameter with ``requires_grad`` is trained.

    A parameter that stands in two layers (a tied embedding) is owned by the first and borrowed by the second.
    """
    model = skeleton.model
    owner: dict[int, tuple[int, str]] = {}
    layers: list[list[TensorSpec]] = []
    borrows: dict[int, list[Borrow]] = {}
    packed: dict[int, dict[str, PackedWeight]] = {}
    for index, (prefixes, part) in enumerate(_module_paths(skeleton)):
        specs: list[TensorSpec] = []
        for prefix in prefixes:
            module = model.get_submodule(prefix)
            for name, parameter in module.named_parameters():
                full = f"{prefix}.{name}"
                if part is not None and not part.holds(name):
                    continue
                some = None if part is None else part.slice_of(name)
                if id(parameter) in owner:
                    borrows.setdefault(index, []).append(Borrow(full, *owner[id(parameter)]))
                    continue
                if some is None:
                    owner[id(parameter)] = (index, full)
                kept = skeleton.checkpoint_names.get(id(parameter))
                stored = full if some is None else full + some.mark
                if full in skeleton.quantized:
                    quantized = skeleton.quantized[full]
                    own = quantized if some is None else quantized.of_experts(some.experts)
                    packed.setdefault(index, {})[stored] = own
                    specs += _parts(stored, own, kept, some)
                    continue
                shape = tuple(parameter.shape)
                specs.append(
                    TensorSpec(
                        stored,
                        shape if some is None else some.shape(shape),
                        dtype,
                        trained=parameter.requires_grad,
                        decay=parameter.dim() >= 2 and not name.rsplit(".", 1)[-1].endswith("bias"),
                        checkpoint_name=kept,
                        slice=some,
                    )
                )
            for name, buffer in persistent_buffers(module):
                if part is not None and not part.holds(name):
                    continue
                kept = skeleton.checkpoint_names.get(id(buffer))
                specs.append(TensorSpec(f"{prefix}.{name}", tuple(buffer.shape), buffer.dtype, False, False, kept))
        layers.append(specs)
    if not any(spec.trained for specs in layers for spec in specs):
        raise UserError("nothing to train: no parameter of the model is left trainable by the adapter settings")
    layouts = build_layouts(layers, borrows, packed)
    hidden_size, parts = model.config.get_text_config().hidden_size, skeleton.parts
    for layer, part in enumerate(parts, start=1):
        picks = skeleton.choices[part.block] if part.experts is None and skeleton.choices else ()
        layouts[layer] = replace(
            layouts[layer],
            choices=picks,
            number=1 + part.block,
            experts=part.experts,
            extra_input_bytes=part.extra_elements(hidden_size) * dtype.itemsize,
            adapted_bytes=_adapted_elements(skeleton.blocks[part.block], part) * dtype.itemsize,
        )
    layouts[-1] = replace(layouts[-1], number=1 + skeleton.num_blocks)
    return layouts


def _adapted_elements(block: Any, part: Part) -> int:
    """Elements of the parameters in ``part`` of ``block`` that have adapters of their own."""
    total = 0
    for path, module in block.named_modules():
        if is_parameter_adapter(module) and part.holds(f"{path}.{module.parameter_name}"):
            shape, some = tuple(module.get_param().shape), part.slice_of(module.parameter_name)
            total += math.prod(shape if some is None else some.shape(shape))
    return total


def _parts(
    name: str, packed: PackedWeight, checkpoint_name: str | None, some: ExpertSlice | None
) -> list[TensorSpec]:
    """The tensors that a quantised weight is stored as; the first stands for all in the checkpoint."""
    return [
        TensorSpec(name + suffix, shape, dtype, False, False, None if suffix else checkpoint_name, some)
        for suffix, (shape, dtype) in packed.part_shapes().items()
    ]


def _module_paths(skeleton: Skeleton) -> list[tuple[list[str], Part | None]]:
    """For each layer the paths of its modules, and which part it is of a block that is there."""
    blocks = [([f"{skeleton.blocks_path}.{part.block}"], part) for part in skeleton.parts]
    return [(list(skeleton.embedding_modules), None), *blocks, (list(skeleton.head_modules), None)]


def freeze_all(model: nn.Module) -> None:
    """Leaves no parameter trainable; what an adapter adds afterwards is."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
