"""From a skeleton to the list of layers: which tensors each owns, which it borrows, which are trained."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.layout import Borrow, LayerLayout, TensorSpec, build_layouts
from rpft.model.parts import Part
from rpft.model.quant import PackedWeight
from rpft.model.skeleton import Skeleton, persistent_buffers


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
                if part is not None and part.experts is not None:
                    quantized = skeleton.quantized.get(full)
                    kept = skeleton.checkpoint_names.get(id(parameter))
                    specs += _of_experts(full, tuple(parameter.shape), dtype, kept, part, quantized)
                    if quantized is not None:
                        packed.setdefault(index, {})[full + part.mark] = quantized.of_experts(part.experts)
                    continue
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
        )
    layouts[-1] = replace(layouts[-1], number=1 + skeleton.num_blocks)
    return layouts


def _parts(name: str, packed: PackedWeight, checkpoint_name: str | None) -> list[TensorSpec]:
    """The tensors that a quantised weight is stored as; the first stands for all in the checkpoint."""
    return [
        TensorSpec(name + suffix, shape, dtype, False, False, None if suffix else checkpoint_name)
        for suffix, (shape, dtype) in packed.part_shapes().items()
    ]


def _of_experts(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    checkpoint_name: str | None,
    part: Part,
    quantized: PackedWeight | None,
) -> list[TensorSpec]:
    """The tensors of the experts of ``part`` that come from the stack ``name``; of a quantised one the parts."""
    assert part.experts is not None
    if quantized is not None:
        specs = _parts(name + part.mark, quantized.of_experts(part.experts), checkpoint_name)
    else:
        some = len(part.experts), *shape[1:]
        specs = [TensorSpec(name + part.mark, some, dtype, False, False, checkpoint_name)]
    return [replace(spec, experts=part.experts) for spec in specs]


def _module_paths(skeleton: Skeleton) -> list[tuple[list[str], Part | None]]:
    """For each layer the paths of its modules, and which part it is of a block that is there."""
    blocks = [([f"{skeleton.blocks_path}.{part.block}"], part) for part in skeleton.parts]
    return [(list(skeleton.embedding_modules), None), *blocks, (list(skeleton.head_modules), None)]


def freeze_all(model: nn.Module) -> None:
    """Leaves no parameter trainable; what an adapter adds afterwards is."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
