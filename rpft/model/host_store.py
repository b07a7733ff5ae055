"""The host store: working weights, gradients, master weights and moments of every layer, flat in RAM.

Per trained parameter in bfloat16: working weight 2 bytes, gradient 4, master 4, two moments 8. In float32
the working weight is its own master, unless updates are delayed. A frozen parameter has its working weight only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rpft.model.layout import LayerLayout

HostAllocator = Callable[[int], torch.Tensor]
"""Bytes to a uint8 tensor of exactly that many bytes of host memory, page-locked where the device wants it."""


def pageable(num_bytes: int) -> torch.Tensor:
    """Ordinary host memory, zeroed on first touch by the system."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


@dataclass
class HostLayer:
    """The host buffers of one layer: ``weights`` uint8 [host_bytes], ``gradient`` float32 [grad_elements].

    Masters and moments are float32 [num_trained].
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
        self, layouts: list[LayerLayout], allocate: HostAllocator = pageable, *, separate_masters: bool = False
    ) -> None:
        """Allocates every buffer. Weights and gradients cross the link and come from ``allocate``.

        ``separate_masters``: float32 weights have masters of their own too, which a delayed update needs: it
        is computed while the old weights are still being read.
        """
        self.layers: list[HostLayer] = []
        self._layer_of: dict[str, int] = {}
        for layout in layouts:
            weights = allocate(layout.host_bytes)
            floats = layout.num_trained
            gradient = allocate(layout.grad_elements * 4).view(torch.float32)
            trained = [spec for spec, _ in layout.own.values() if spec.trained]
            if trained and trained[0].dtype == torch.float32 and not separate_masters:
                master = weights[: floats * 4].view(torch.float32)
            else:
                master = torch.zeros(floats)
            self.layers.append(
                HostLayer(layout, weights, gradient, master, torch.zeros(floats), torch.zeros(floats))
            )
            self._layer_of.update(dict.fromkeys(layout.own, layout.layer))

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


def store_bytes(layouts: list[LayerLayout], separate_masters: bool = False) -> int:
    """Host bytes that a store of these layouts takes, exactly."""
    total = 0
    for layout in layouts:
        trained = [spec for spec, _ in layout.own.values() if spec.trained]
        own_master = bool(trained) and (separate_masters or trained[0].dtype != torch.float32)
        total += layout.host_bytes + 4 * layout.grad_elements + layout.num_trained * (12 if own_master else 8)
    return total
