"""The host store: working weights, gradients, master weights and moments of every layer, flat in RAM.

Per trained parameter in bfloat16: working weight 2 bytes, what its float32 master has beyond it 2, gradient 2 or
4, two moments 8, or less (model/moments.py). In float32 the working weight is its own master. Where updates are
delayed there are two copies of the working weights: an update reads one and writes the other, which no running
step reads. A frozen parameter has its working weight only, or, quantised, the parts that it is stored as
(model/quant.py); or that lies in a file on the disk, which is mapped (model/frozen_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rpft.model.frozen_file import FrozenFile
from rpft.model.host_layer import HostLayer
from rpft.model.layout import LayerLayout, TensorSpec
from rpft.model.moments import StateFormat, moments_bytes, stored_block
from rpft.model.moments_file import MomentsFile
from rpft.model.pages import zeroed_pages
from rpft.model.quant import PackedWeight, Parts
from rpft.model.update_order import backward_order

HostAllocator = Callable[[int], torch.Tensor]
"""Bytes to a uint8 tensor of exactly that many zeroed bytes of host memory, page-locked where the device wants it.

Several threads call it at once.
"""

_ALLOCATING_THREADS = 4
"""Layers allocated at once: page-locking one buffer overlaps touching another."""


class HostStore:
    """All layers' host buffers, addressed by layer number and tensor name."""

    def __init__(
        self,
        layouts: list[LayerLayout],
        allocate: HostAllocator = zeroed_pages,
        *,
        two_copies: bool = False,
        whole_masters: bool = False,
        gradient_dtype: torch.dtype = torch.float32,
        state_format: StateFormat = "fp32",
        frozen_file: FrozenFile | None = None,
        moments_file: MomentsFile | None = None,
    ) -> None:
        """Allocates every buffer. Weights and gradients cross the link and come from ``allocate``.

        ``two_copies``: of the working weights, as delayed updates need them. ``whole_masters``: float32 masters of
        bfloat16 weights, 2 bytes more, for an optimizer that would have to join and split halves.
        ``state_format``: of the moments. ``frozen_file`` and ``moments_file``: where frozen weights and moments
        lie, None for RAM.
        """
        self._allocate = allocate
        self._two_copies, self._whole_masters = two_copies, whole_masters
        self.gradient_dtype = gradient_dtype
        self.state_format: StateFormat = state_format
        self._frozen_file, self.moments_file = frozen_file, moments_file
        self.frozen_is_sealed = frozen_file is not None and frozen_file.whole
        """Whether the frozen weights are there and must not be written: they lie in a file that is whole."""
        parts = [None] * len(layouts) if frozen_file is None else frozen_file.map()
        with ThreadPoolExecutor(_ALLOCATING_THREADS, "allocator") as pool:
            self.layers: list[HostLayer] = list(pool.map(self._allocate_layer, layouts, parts))
        self._layer_of = {name: layout.layer for layout in layouts for name in layout.own}
        owners = [[piece.layer for piece in layout.borrowed_gradients] for layout in layouts]
        self.update_order = backward_order(owners) if two_copies else list(range(len(layouts)))
        """Of the layers: that in which what waits for their updates comes.

        The next forward waits for new weights, its first layers first. With two copies it does not, and what
        waits is the next backward, whose gradients, the last layer's first, land where those before are read.
        """

    def _allocate_layer(self, layout: LayerLayout, frozen: torch.Tensor | None) -> HostLayer:
        weights = self._allocate(layout.host_bytes if frozen is None else layout.frozen_start)
        frozen = weights[layout.frozen_start :] if frozen is None else frozen
        gradient = self._allocate(layout.grad_elements * self.gradient_dtype.itemsize).view(self.gradient_dtype)
        trained_bytes, master_bytes = _trained_bytes(layout, self._whole_masters)
        copies = self._two_copies and trained_bytes > 0
        second = self._allocate(trained_bytes) if copies else torch.empty(0, dtype=torch.uint8)
        master = zeroed_pages(master_bytes).view(torch.int16 if master_bytes == trained_bytes else torch.float32)
        file = self.moments_file if layout.num_trained else None
        state = zeroed_pages(moments_bytes(self.state_format, layout.num_trained if file is None else 0))
        return HostLayer(layout, weights, second, gradient, master, self.state_format, state, file, frozen)

    @property
    def on_disk(self) -> bool:
        """Whether frozen weights lie in a file."""
        return self._frozen_file is not None

    def seal(self) -> None:
        """Says that all frozen weights are written. Those in a file are safe there, and only read from now on."""
        if self._frozen_file is None or self.frozen_is_sealed:
            return
        for layer in self.layers:
            # The mapping that can be written goes with the last view.
            layer.frozen = torch.empty(0, dtype=torch.uint8)
        for layer, part in zip(self.layers, self._frozen_file.seal(), strict=True):
            layer.frozen = part
        self.frozen_is_sealed = True

    def drop_gradients(self) -> None:
        """Gives the RAM of all gradients back, when no step is to come.

        It is never less than what saving the result takes anew: tensors that lie in slices are joined for that, in
        the working precision, of which that of gradients is at least as wide.
        """
        for layer in self.layers:
            layer.gradient = torch.empty(0, dtype=self.gradient_dtype)

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
        return spec.view_in(layer.run(layer.latest, offset, offset + spec.num_bytes), 0)

    def lagging_tensor(self, name: str) -> torch.Tensor:
        """The working tensor ``name`` of one update ago, in a store of two copies."""
        layer, start, spec = self._trained(name)
        return layer.lagging[start : start + spec.num_elements].view(spec.shape)

    def layer_weights(self, layer: int) -> dict[str, torch.Tensor]:
        """Every tensor that the functions of ``layer`` use, borrowed ones too: views of the host buffers."""
        weights = {}
        layout = self.layers[layer].layout
        for b in layout.bindings:
            piece = next(p for p in layout.weight_pieces if 0 <= b.byte_offset - p.region_offset < p.length)
            start = piece.start + b.byte_offset - piece.region_offset
            owner = self.layers[piece.layer]
            weights[b.name] = b.view_in(owner.run(owner.latest, start, start + b.num_bytes), 0)
        return weights

    def trained_view(self, name: str, flat: str) -> torch.Tensor:
        """The part of ``gradient``, ``exp_avg`` or ``exp_avg_sq`` that belongs to ``name``."""
        layer, start, spec = self._trained(name)
        return getattr(layer, flat)[start : start + spec.num_elements].view(spec.shape)

    def master(self, name: str) -> torch.Tensor:
        """The float32 master of ``name``, for reading: it may be a copy."""
        layer, start, spec = self._trained(name)
        return layer.master_values(start, start + spec.num_elements).view(spec.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor ``name``; of a quantised one, that of the weight it stands for."""
        layout = self.layers[self._layer_of[name]].layout
        return layout.packed[name].shape if name in layout.packed else layout.own[name][0].shape

    def packed(self, name: str) -> PackedWeight | None:
        """How ``name`` is quantised, if it is."""
        return self.layers[self._layer_of[name]].layout.packed.get(name)

    def parts(self, name: str) -> Parts:
        """The parts of a quantised weight, views of the host buffer."""
        packed = self.packed(name)
        assert packed is not None, name
        return {suffix: self.tensor(name + suffix) for suffix in packed.part_shapes()}

    def write(self, name: str, value: torch.Tensor, expert: int | None = None) -> None:
        """Stores ``value`` as the working tensor, quantised if it is kept so, and unrounded as its master.

        ``expert``: of several that are stacked in the tensor the one that ``value`` is; None for the whole.
        """
        layout = self.layers[self._layer_of[name]].layout
        trained = layout.own[name][0].trained
        assert trained or not self.frozen_is_sealed, name
        if name in layout.packed:
            packed, parts = layout.packed[name], self.parts(name)
            if expert is not None:
                packed, parts = packed.expert(expert, parts)
            packed.quantize_into(value, parts)
            return
        target = self.tensor(name) if expert is None else self.tensor(name)[expert]
        assert value.shape == target.shape, name
        if not trained:
            target.copy_(value)
            return
        layer, start, _ = self._trained(name)
        start += (expert or 0) * target.numel()
        if layer.master_is_split and value.dtype == torch.bfloat16:  # as most checkpoints hold it
            target.copy_(value)
            layer.master[start : start + target.numel()].zero_()
            return
        layer.write_master(value.detach().to("cpu", torch.float32).flatten(), start)

    def write_state(self, name: str, kind: str, values: torch.Tensor) -> None:
        """Stores ``values`` as what the tensor ``name`` has in the field ``kind`` of the moments."""
        layer, start, _ = self._trained(name)
        layer.write_state(kind, start // stored_block(self.state_format, kind), values.flatten())

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
        return sum(layer.layout.num_parameters for layer in self.layers)


def _trained_bytes(layout: LayerLayout, whole_masters: bool) -> tuple[int, int]:
    """Bytes of a layer's trained working weights, and of what their masters are beside them."""
    dtype = layout.trained_dtype
    size = 0 if dtype == torch.float32 else 4 if whole_masters or dtype == torch.float16 else 2
    return layout.num_trained * dtype.itemsize, layout.num_trained * size


def store_bytes(
    layouts: Sequence[LayerLayout],
    gradient_dtype: torch.dtype = torch.float32,
    *,
    two_copies: bool = False,
    whole_masters: bool = False,
    state_format: StateFormat = "fp32",
    frozen_on_disk: bool = False,
    moments_on_disk: bool = False,
) -> int:
    """Host bytes that a store of these layouts takes, exactly."""
    total = 0
    for layout in layouts:
        trained_bytes, master_bytes = _trained_bytes(layout, whole_masters)
        gradient = layout.grad_elements * gradient_dtype.itemsize
        weights = layout.frozen_start if frozen_on_disk else layout.host_bytes
        total += weights + two_copies * trained_bytes + gradient + master_bytes
        total += moments_bytes(state_format, 0 if moments_on_disk else layout.num_trained)
    return total
