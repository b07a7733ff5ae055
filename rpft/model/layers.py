"""From a skeleton to the list of layers: which tensors each owns, which it borrows, which are trained."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.layout import Borrow, LayerLayout, TensorSpec, build_layouts
from rpft.model.quant import PackedWeight
from rpft.model.skeleton import Skeleton, persistent_buffers


def layer_names(skeleton: Skeleton) -> list[str]:
    """A short name a layer, for messages: embedding, block 0 ..., head."""
    return ["embedding", *(f"block {i}" for i in range(skeleton.num_blocks)), "head"]


def build_layers(skeleton: Skeleton, dtype: torch.dtype) -> list[LayerLayout]:
    """The layouts of embedding, blocks and head. A parameter with ``requires_grad`` is trained.

    A parameter that stands in two layers (a tied embedding) is owned by the first and borrowed by the second.
    """
    model = skeleton.model
    owner: dict[int, tuple[int, str]] = {}
    layers: list[list[TensorSpec]] = []
    borrows: dict[int, list[Borrow]] = {}
    packed: dict[int, dict[str, PackedWeight]] = {}
    for index, prefixes in enumerate(_module_paths(skeleton)):
        specs: list[TensorSpec] = []
        for prefix in prefixes:
            module = model.get_submodule(prefix)
            for name, parameter in module.named_parameters():
                full = f"{prefix}.{name}"
                if id(parameter) in owner:
                    borrows.setdefault(index, []).append(Borrow(full, *owner[id(parameter)]))
                    continue
                owner[id(parameter)] = (index, full)
                kept = skeleton.checkpoint_names.get(id(parameter))
                if full in skeleton.quantized:
                    packed.setdefault(index, {})[full] = skeleton.quantized[full]
                    specs += _parts(full, skeleton.quantized[full], kept)
                    continue
                decay = parameter.dim() >= 2 and not name.rsplit(".", 1)[-1].endswith("bias")
                specs.append(
                    TensorSpec(
                        full,
                        tuple(parameter.shape),
                        dtype,
                        trained=parameter.requires_grad,
                        decay=decay,
                        checkpoint_name=kept,
                    )
                )
            for name, buffer in persistent_buffers(module):
                kept = skeleton.checkpoint_names.get(id(buffer))
                specs.append(TensorSpec(f"{prefix}.{name}", tuple(buffer.shape), buffer.dtype, False, False, kept))
        layers.append(specs)
    if not any(spec.trained for specs in layers for spec in specs):
        raise UserError("nothing to train: no parameter of the model is left trainable by the adapter settings")
    layouts = build_layouts(layers, borrows, packed)
    for number, choices in enumerate(skeleton.choices, start=1):
        layouts[number] = replace(layouts[number], choices=choices)
    return layouts


def _parts(name: str, packed: PackedWeight, checkpoint_name: str | None) -> list[TensorSpec]:
    """The tensors that a quantised weight is stored as; the first stands for all in the checkpoint."""
    return [
        TensorSpec(name + suffix, shape, dtype, False, False, None if suffix else checkpoint_name)
        for suffix, (shape, dtype) in packed.part_shapes().items()
    ]


def _module_paths(skeleton: Skeleton) -> list[list[str]]:
    blocks = [[f"{skeleton.blocks_path}.{i}"] for i in range(skeleton.num_blocks)]
    return [list(skeleton.embedding_modules), *blocks, list(skeleton.head_modules)]


def freeze_all(model: nn.Module) -> None:
    """Leaves no parameter trainable; what an adapter adds afterwards is."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
