"""The host store: working weights, gradients, master weights and moments of every layer, flat in RAM.

Per trained parameter in bfloat16: working weight 2 bytes, gradient 2 or 4, master 4, two moments 8. In float32
the working weight is its own master, unless updates are delayed. A frozen parameter has its working weight only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rpft.model.layout import LayerLayout
from rpft.model.pages import zeroed_pages

HostAllocator = Callable[[int], torch.Tensor]
"""Bytes to a uint8 tensor of exactly that many zeroed bytes of host memory, page-locked where the device wants it.

Several threads call it at once.
"""

_ALLOCATING_THREADS = 4
"""Layers allocated at once: page-locking one buffer overlaps touching another."""


@dataclass
class HostLayer:
    """The host buffers of one layer: ``weights`` uint8 [host_bytes], ``gradient`` [grad_elements].

    The gradient is float32 or bfloat16; masters and moments are float32 [num_trained].
    """

    layout: LayerLayout
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
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

        ``separate_masters``: float32 weights have masters of their own too, which a delayed update needs: it
        is computed while the old weights are still being read.
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
        trained = [spec for spec, _ in layout.own.values() if spec.trained]
        if trained and trained[0].dtype == torch.float32 and not self._separate_masters:
            master = weights[:state_bytes].view(torch.float32)
        else:
            master = zeroed_pages(state_bytes).view(torch.float32)
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
        """The part of ``gradient``, ``master``, ``exp_avg`` or ``exp_avg_sq`` that belongs to ``name``."""
        layer = self.layers[self._layer_of[name]]
        spec, offset = layer.layout.own[name]
        assert spec.trained, name
        start = offset // spec.dtype.itemsize
        return getattr(layer, flat)[start : start + spec.num_elements].view(spec.shape)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Stores ``value`` as the working tensor and, unrounded, as its master."""
        target = self.tensor(name)
        target.copy_(value)
        layer = self.layers[self._layer_of[name]]
        if layer.layout.own[name][0].trained and not layer.master_is_working:
            self.trained_view(name, "master").copy_(value)

    @property
    def num_trained(self) -> int:
        """Trained parameters, padding left out."""
        return sum(s.num_elements for layer in self.layers for s, _ in layer.layout.own.values() if s.trained)

    @property
    def num_parameters(self) -> int:
        return sum(s.num_elements for layer in self.layers for s, _ in layer.layout.own.values())


def store_bytes(
    layouts: list[LayerLayout], separate_masters: bool = False, gradient_dtype: torch.dtype = torch.float32
) -> int:
    """Host bytes that a store of these layouts takes, exactly."""
    total = 0
    for layout in layouts:
        trained = [spec for spec, _ in layout.own.values() if spec.trained]
        own_master = bool(trained) and (separate_masters or trained[0].dtype != torch.float32)
        gradient = layout.grad_elements * gradient_dtype.itemsize
        total += layout.host_bytes + gradient + layout.num_trained * (12 if own_master else 8)
    return total
