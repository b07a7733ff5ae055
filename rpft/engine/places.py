"""Where the tensors of layers lie in a worker's buffers: views, made once for each stage and buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from rpft.model.block_backward import Weights
from rpft.model.layout import Binding, LayerLayout
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts


class _Key(NamedTuple):
    what: str
    stage: Stage
    address: int
    """Of the buffer, which the worker has as long as this."""


class Places:
    """The views of one worker, by layer and name; for its compute thread.

    To make those of a slot takes milliseconds, and a worker has the same stages in the same buffers in every step.
    """

    def __init__(self, layouts: list[LayerLayout], resident: Mapping[int, torch.Tensor]) -> None:
        """``resident``: layer to its frozen weights on the device, uint8, of those that stay there."""
        self._layouts, self._resident = layouts, resident
        self._made: dict[_Key, dict[int, Weights]] = {}

    def weights(self, stage: Stage, buffer: torch.Tensor) -> dict[int, Weights]:
        """The weights of each layer of ``stage``, uploaded to ``buffer``, uint8."""

        def make() -> dict[int, Weights]:
            starts = region_starts(self._layouts, stage)
            return {layer: self._weights_of(layer, starts[layer][0], buffer) for layer in stage.layers}

        return self._once(_Key("weights", stage, buffer.data_ptr()), make)

    def sums(self, stage: Stage, flat: torch.Tensor) -> dict[int, Weights]:
        """The running gradient sum of each trained tensor of each layer, in the accumulator ``flat``, float32."""

        def make() -> dict[int, Weights]:
            starts = region_starts(self._layouts, stage)
            return {layer: self._sums_of(layer, starts[layer][1], flat) for layer in stage.layers}

        return self._once(_Key("sums", stage, flat.data_ptr()), make)

    def _once(self, key: _Key, make: Callable[[], dict[int, Weights]]) -> dict[int, Weights]:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _weights_of(self, layer: int, start: int, buffer: torch.Tensor) -> Weights:
        layout, stays = self._layouts[layer], self._resident.get(layer)

        def place(binding: Binding) -> torch.Tensor:
            if stays is not None and layout.is_frozen(binding):
                tensor = binding.view_in(stays, binding.byte_offset - layout.frozen_start)
            else:
                tensor = binding.view_in(buffer, start + binding.byte_offset)
            # `data`: a module that sets a weight to itself (peft does) must not count as writing the others.
            return tensor.data

        return {binding.name: place(binding) for binding in layout.bindings}

    def _sums_of(self, layer: int, start: int, flat: torch.Tensor) -> Weights:
        return {
            b.name: flat[start + b.grad_offset : start + b.grad_offset + b.num_elements].view(b.shape)
            for b in self._layouts[layer].bindings
            if b.grad_offset is not None
        }
