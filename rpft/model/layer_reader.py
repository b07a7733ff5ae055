"""The base model's tensors of one layer at a time, straight from a checkpoint: for what needs no host store."""

from __future__ import annotations

from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.checkpoint import Checkpoint
from rpft.model.checkpoint_reads import Expert, ReadTensors, plan_reads
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton


class LayerReader:
    """Reads layers in any order, each once. Whatever need not be converted is a view of the mapped file."""

    def __init__(self, checkpoint: Checkpoint, skeleton: Skeleton, layouts: list[LayerLayout]) -> None:
        self._folder = checkpoint.folder
        self._specs = [
            {spec.checkpoint_name: spec for spec, _ in layout.own.values() if spec.checkpoint_name is not None}
            for layout in layouts
        ]
        layer_of = {name: layer for layer, specs in enumerate(self._specs) for name in specs}
        self._buffers = dict(skeleton.model.named_buffers())
        self._reads: list[list[ReadTensors]] = [[] for _ in layouts]
        reads, _ = plan_reads(checkpoint, skeleton, {})
        for name, read in reads.items():
            layer = layer_of.get(name.partition("[")[0])  # of one expert the stack is meant
            if layer is not None:
                self._reads[layer].append(read)

    def read(self, layer: int) -> dict[str, torch.Tensor]:
        """Tensors of ``layer`` by their names in the model before adapters, as the checkpoint holds them.

        UserError for one that is missing or has another shape than the config asks for.
        """
        found: dict[str, Any] = {}
        specs = self._specs[layer]
        for read in self._reads[layer]:
            for name, value in read().items():
                if not isinstance(value, Expert):
                    found[name] = value
                elif name in specs and value.value.shape == specs[name].shape[1:]:
                    if name not in found:
                        found[name] = value.value.new_empty(specs[name].shape)
                    found[name][value.number].copy_(value.value)
        tensors = {}
        for name, spec in specs.items():
            tensor = found.get(name, self._buffers.get(spec.name))
            shape = None if tensor is None else tuple(tensor.shape)
            if tensor is None or shape != spec.shape:
                raise UserError(
                    f"{self._folder}: tensor {name} is {'missing' if shape is None else list(shape)}, and the"
                    f" model needs {list(spec.shape)}: it is not the model that was trained"
                )
            tensors[name] = tensor
        return tensors
