"""The host store: working weights, gradients, master weights and moments of every layer, flat in RAM.

Per trained parameter in bfloat16: working weight 2 bytes, what its float32 master has beyond it 2, gradient 2 or
4, two moments 8. In float32 the working weight is its own master. Where updates are delayed, masters are whole and
apart, 4 bytes, since the old working weights are read while they change. A frozen parameter has its working weight
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rpft.model.layout import LayerLayout, TensorSpec
from rpft.model.pages import zeroed_pages
from rpft.model.split_float import join, split_into

HostAllocator = Callable[[int], torch.Tensor]
"""Bytes to a uint8 tensor of exactly that many zeroed bytes of host memory, page-locked where the device wants it.

Several threads call it at once.
"""

_ALLOCATING_THREADS = 4
"""Layers allocated at once: page-locking one buffer overlaps touching another."""


@dataclass
class HostLayer:
    """The host buffers of one layer: ``weights`` uint8 [host_bytes], ``gradient`` [grad_elements].

    The gradient is float32 or bfloat16, the moments float32 [num_trained].
    """

    layout: LayerLayout
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    """[num_trained]: float32, or the int16 half that ``working`` lacks (model/split_float.py)."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def working(self) -> torch.Tensor:
        """The trained part of ``weights`` as a flat tensor of the working dtype, [num_trained]."""
        dtype = next((spec.dtype for spec, _ in self.layout.own.values() if spec.trained), torch.float32)
        return self.weights[: self.layout.num_trained * dtype.itemsize].view(dtype)

    @property
    def master_is_working(self) -> bool:
        """Whether the optimizer writes straight into the working weights."""
        return self.layout.num_trained > 0 and self.master.data_ptr() == self.weights.data_ptr()

    @property
    def master_is_split(self) -> bool:
        """Whether working weights and ``master`` together are the masters."""
        return self.master.dtype == torch.int16

    def master_values(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Masters ``start`` to ``stop`` as float32, flat: for reading, since it may be a copy."""
        part = slice(start, stop)
        return join(self.working[part], self.master[part]) if self.master_is_split else self.master[part]

    def write_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Stores ``values``, float32 and flat, as masters from ``start`` on, and rounded as working weights."""
        part = slice(start, start + len(values))
        if self.master_is_split:
            split_into(self.working[part], self.master[part], values)
            return
        self.master[part].copy_(values)
        if not self.master_is_working:
            self.working[part].copy_(values)


class HostStore:
    """All layers' host buffers, addressed by layer number and tensor name."""

    def __init__(
        self,
        layouts: list[LayerLayout],
        allocate: HostAllocator = zeroed_pages,
        *,
        separate_masters: bool = False,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates every buffer. Weights and gradients cross the link and come from ``allocate``.

        ``separate_masters``: masters are whole and apart from the working weights, which a delayed update needs:
        it is computed while the old weights are still being read.
        """
        self._allocate = allocate
        self._separate_masters = separate_masters
        self.gradient_dtype = gradient_dtype
        with ThreadPoolExecutor(_ALLOCATING_THREADS, "allocator") as pool:
            self.layers: list[HostLayer] = list(pool.map(self._allocate_layer, layouts))
        self._layer_of = {name: layout.layer for layout in layouts for name in layout.own}

    def _allocate_layer(self, layout: LayerLayout) -> HostLayer:
        weights = self._allocate(layout.host_bytes)
        gradient = self._allocate(layout.grad_elements * self.gradient_dtype.itemsize).view(self.gradient_dtype)
        state_bytes = layout.num_trained * 4
        size = _master_itemsize(layout, self._separate_masters)
        if size == 0:
            master = weights[:state_bytes].view(torch.float32)
        else:
            master = zeroed_pages(layout.num_trained * size).view(torch.float32 if size == 4 else torch.int16)
        exp_avg, exp_avg_sq = (zeroed_pages(state_bytes).view(torch.float32) for _ in range(2))
        return HostLayer(layout, weights, gradient, master, exp_avg, exp_avg_sq)

    def __contains__(self, name: str) -> bool:
        return name in self._layer_of

    def names(self) -> Iterator[str]:
        """Every tensor's name, layer by layer."""
        return iter(self._layer_of)

    def layer_of(self, name: str) -> int:
        return self._layer_of[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The working tensor ``name``, a view of its host buffer."""
        layer = self.layers[self._layer_of[name]]
        spec, offset = layer.layout.own[name]
        return spec.view_in(layer.weights, offset)

    def layer_weights(self, layer: int) -> dict[str, torch.Tensor]:
        """Every tensor that the functions of ``layer`` use, borrowed ones too: views of the host buffers."""
        weights = {}
        layout = self.layers[layer].layout
        for b in layout.bindings:
            piece = next(p for p in layout.weight_pieces if 0 <= b.byte_offset - p.region_offset < p.length)
            start = piece.start + b.byte_offset - piece.region_offset
            weights[b.name] = b.view_in(self.layers[piece.layer].weights, start)
        return weights

    def trained_view(self, name: str, flat: str) -> torch.Tensor:
        """The part of ``gradient``, ``exp_avg`` or ``exp_avg_sq`` that belongs to ``name``."""
        layer, start, spec = self._trained(name)
        return getattr(layer, flat)[start : start + spec.num_elements].view(spec.shape)

    def master(self, name: str) -> torch.Tensor:
        """The float32 master of ``name``, for reading: it may be a copy."""
        layer, start, spec = self._trained(name)
        return layer.master_values(start, start + spec.num_elements).view(spec.shape)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Stores ``value`` as the working tensor and, unrounded, as its master."""
        if not self.layers[self._layer_of[name]].layout.own[name][0].trained:
            self.tensor(name).copy_(value)
            return
        layer, start, spec = self._trained(name)
        assert value.shape == spec.shape, name
        if layer.master_is_split and value.dtype == torch.bfloat16:  # as most checkpoints hold it
            self.tensor(name).copy_(value)
            layer.master[start : start + spec.num_elements].zero_()
            return
        layer.write_master(value.detach().to("cpu", torch.float32).flatten(), start)

    def _trained(self, name: str) -> tuple[HostLayer, int, TensorSpec]:
        """(layer, first element, spec) of a trained tensor."""
        layer = self.layers[self._layer_of[name]]
        spec, offset = layer.layout.own[name]
        assert spec.trained, name
        return layer, offset // spec.dtype.itemsize, spec

    @property
    def num_trained(self) -> int:
        """Trained parameters, padding left out."""
        return sum(s.num_elements for layer in self.layers for s, _ in layer.layout.own.values() if s.trained)

    @property
    def num_parameters(self) -> int:
        return sum(s.num_elements for layer in self.layers for s, _ in layer.layout.own.values())


def _master_itemsize(layout: LayerLayout, separate_masters: bool) -> int:
    """Bytes that a trained parameter's master takes beside its working weight."""
    dtype = next((spec.dtype for spec, _ in layout.own.values() if spec.trained), None)
    if separate_masters or dtype == torch.float16:
        return 4
    return 2 if dtype == torch.bfloat16 else 0


def store_bytes(
    layouts: list[LayerLayout], separate_masters: bool = False, gradient_dtype: torch.dtype = torch.float32
) -> int:
    """Host bytes that a store of these layouts takes, exactly."""
    total = 0
    for layout in layouts:
        gradient = layout.grad_elements * gradient_dtype.itemsize
        state = layout.num_trained * (8 + _master_itemsize(layout, separate_masters))
        total += layout.host_bytes + gradient + state
    return total
