"""Where every tensor of a layer lies: in its flat host buffer, and in a worker's weight and gradient buffers.

A layer's host buffer is one run of bytes, so that one copy moves the whole layer. Trained tensors come
first (with weight decay, then without), frozen tensors and buffers after them:

    host weights   | trained, decayed | trained, not decayed | frozen |
    host gradient  | trained, decayed | trained, not decayed |            float32
    masters, moments likewise

so that the optimizer sees one or two flat slices a layer. On a worker a layer takes a region of the same
bytes, followed by the tensors that it borrows from another layer (the head borrows a tied embedding). Its
gradient has a part for each borrowed tensor too, on the worker and on the host: both uses of a tied weight
sum up alone and meet in the optimizer, so that no plan and no order of rounds changes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rpft.model.quant import PackedWeight
from rpft.model.slices import ExpertSlice

ALIGNMENT_ELEMENTS = 256
"""Every trained tensor starts at a multiple of this, in elements: whole blocks of 8-bit moments."""

ALIGNMENT_BYTES = 256


def align(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


class FlatTensor:
    """A tensor of known shape and dtype that lies somewhere in a flat buffer of bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def view_in(self, buffer: torch.Tensor, byte_offset: int) -> torch.Tensor:
        """The tensor as a view of ``buffer``, uint8, from ``byte_offset`` on."""
        return buffer[byte_offset : byte_offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class TensorSpec(FlatTensor):
    """One parameter or persistent buffer of the model."""

    name: str
    """Full name in the model that runs, adapters included."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    decay: bool
    """Whether weight decay applies: matrices yes, norms and biases no."""
    checkpoint_name: str | None
    """Full name in the model before adapters; None for a tensor that no checkpoint of the base model holds."""
    slice: ExpertSlice | None = None
    """Which part it is of a tensor of a stack of experts; None for a tensor that is whole."""

    @property
    def whole_name(self) -> str:
        """The name, in the model, of the tensor that it is, or is a slice of."""
        return self.name if self.slice is None else self.name.replace(self.slice.mark, "")

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of that tensor."""
        return self.shape if self.slice is None else self.slice.whole_shape(self.shape)


@dataclass(frozen=True)
class Binding(FlatTensor):
    """A tensor as a layer's function sees it, at its place in the worker's region of that layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    byte_offset: int
    grad_offset: int | None
    """Element offset in the region's float32 gradient; None for a frozen tensor."""


@dataclass(frozen=True)
class Piece:
    """A run of the host buffer of ``layer`` (bytes of weights, elements of gradient) and its place in a region."""

    layer: int
    start: int
    stop: int
    region_offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayerLayout:
    """The places of one layer's tensors; offsets in bytes for weights and in elements for gradients."""

    layer: int
    own: dict[str, tuple[TensorSpec, int]]
    """Name to (spec, byte offset in the host buffer), in order of offset."""
    host_bytes: int
    num_trained: int
    """Elements of the trained part, padding included."""
    num_decayed: int
    bindings: tuple[Binding, ...]
    weight_pieces: tuple[Piece, ...]
    borrowed_gradients: tuple[Piece, ...]
    """Parts of this layer's gradient that are to be added to another layer's."""
    region_bytes: int
    grad_elements: int
    """Elements of the layer's gradient: own, then borrowed."""
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)
    """The quantised weights by name. Each lies in ``own`` as its parts: NAME and NAME.SUFFIX."""
    choices: tuple[int, ...] = ()
    """Of a block what its routers pick, in bytes a token: see model/routing.py."""
    number: int = 0
    """Among embedding, blocks and head, whatever parts these are cut into; each that is trained is one layer's."""
    experts: range | None = None
    """Of the layer's block those experts that are all it has; None for any other layer."""
    extra_input_bytes: int = 0
    """Bytes a token of the layer's input beyond those of a hidden state."""
    adapted_bytes: int = 0
    """Of stacks in working precision to which adapters are added: that is made whole, beside the stacks."""

    def choice_bytes(self, tokens: int) -> int:
        """Bytes that go with ``tokens`` from the block's forward to its backward, so that experts are the same."""
        return sum(align(each * tokens, ALIGNMENT_BYTES) for each in self.choices)

    @cached_property
    def parts(self) -> frozenset[str]:
        """Names in ``own`` that are parts of quantised weights."""
        return frozenset(name + suffix for name, packed in self.packed.items() for suffix in packed.part_shapes())

    def num_elements_of(self, names: Iterable[str]) -> int:
        """Elements of those own tensors, a quantised weight's once, under its name."""
        return sum(
            self.packed[name].num_elements if name in self.packed else self.own[name][0].num_elements
            for name in names
            if name in self.packed or name not in self.parts
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all own tensors, of quantised ones as many as they stand for."""
        return self.num_elements_of(self.own)

    @property
    def matrices(self) -> list[tuple[tuple[int, ...], bool]]:
        """(shape, whether it is trained) of what the layer's products multiply with, borrowed weights too."""
        whole = [(packed.shape, False) for packed in self.packed.values()]
        plain = [(b.shape, b.grad_offset is not None) for b in self.bindings if b.name not in self.parts]
        return [*whole, *(item for item in plain if len(item[0]) >= 2)]

    @property
    def dequantized_bytes(self) -> int:
        """Of the layer's largest quantised weight in working precision, of which one exists at a time."""
        return max((packed.num_bytes for packed in self.packed.values()), default=0)

    @cached_property
    def trained_dtype(self) -> torch.dtype:
        """Of the trained tensors; float32 where there are none."""
        return next((spec.dtype for spec, _ in self.own.values() if spec.trained), torch.float32)

    @cached_property
    def frozen_start(self) -> int:
        """Where the layer's own frozen tensors begin in its host buffer, in bytes; its end if there are none."""
        frozen = (offset for spec, offset in self.own.values() if not spec.trained)
        return min(frozen, default=self.host_bytes)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the layer's own frozen tensors."""
        return self.host_bytes - self.frozen_start

    def is_frozen(self, binding: Binding) -> bool:
        """Whether ``binding`` is one of the layer's own frozen tensors."""
        return self.frozen_start <= binding.byte_offset < self.host_bytes


@dataclass(frozen=True)
class Borrow:
    """A parameter that a layer uses and another layer owns (tied weights)."""

    name: str
    owner_layer: int
    owner_name: str


def first_trained(layouts: Sequence[LayerLayout]) -> int:
    """The lowest layer that has a gradient: no backward goes below it."""
    return next(layout.layer for layout in layouts if layout.grad_elements)


def place_tensors(specs: Iterable[TensorSpec]) -> tuple[dict[str, tuple[TensorSpec, int]], int, int, int]:
    """Places of own tensors: (name to (spec, byte offset), bytes, trained elements, decayed elements)."""
    ordered = sorted(specs, key=lambda spec: (not spec.trained, not spec.decay if spec.trained else False))
    own: dict[str, tuple[TensorSpec, int]] = {}
    offset = num_trained = num_decayed = 0
    for spec in ordered:
        own[spec.name] = (spec, offset)
        if spec.trained:
            num_trained += align(spec.num_elements, ALIGNMENT_ELEMENTS)
            num_decayed = num_trained if spec.decay else num_decayed
            offset = num_trained * spec.dtype.itemsize
        else:
            offset = align(offset + spec.num_bytes, ALIGNMENT_BYTES)
    return own, offset, num_trained, num_decayed


def build_layouts(
    layers: list[list[TensorSpec]],
    borrows: dict[int, list[Borrow]],
    packed: Mapping[int, Mapping[str, PackedWeight]] | None = None,
) -> list[LayerLayout]:
    """The layout of every layer. ``borrows`` maps a layer to the parameters it takes from another layer.

    ``packed`` maps a layer to its quantised weights, whose parts are among its specs.
    """
    placed = [place_tensors(specs) for specs in layers]
    layouts = []
    for index, (own, host_bytes, num_trained, num_decayed) in enumerate(placed):
        bindings = [
            Binding(s.name, s.shape, s.dtype, offset, offset // s.dtype.itemsize if s.trained else None)
            for s, offset in own.values()
        ]
        weight_pieces = [Piece(index, 0, host_bytes, 0)] if host_bytes else []
        borrowed_gradients = []
        region_bytes, grad_elements = align(host_bytes, ALIGNMENT_BYTES), num_trained
        for borrow in borrows.get(index, []):
            spec, offset = placed[borrow.owner_layer][0][borrow.owner_name]
            weight_pieces.append(Piece(borrow.owner_layer, offset, offset + spec.num_bytes, region_bytes))
            grad_offset = None
            if spec.trained:
                start = offset // spec.dtype.itemsize
                grad_offset = grad_elements
                borrowed_gradients.append(Piece(borrow.owner_layer, start, start + spec.num_elements, grad_offset))
                grad_elements += align(spec.num_elements, ALIGNMENT_ELEMENTS)
            bindings.append(Binding(borrow.name, spec.shape, spec.dtype, region_bytes, grad_offset))
            region_bytes = align(region_bytes + spec.num_bytes, ALIGNMENT_BYTES)
        layouts.append(
            LayerLayout(
                layer=index,
                own=own,
                host_bytes=host_bytes,
                num_trained=num_trained,
                num_decayed=num_decayed,
                bindings=tuple(bindings),
                weight_pieces=tuple(weight_pieces),
                borrowed_gradients=tuple(borrowed_gradients),
                region_bytes=region_bytes,
                grad_elements=grad_elements,
                packed=(packed or {}).get(index, {}),
                number=index,
            )
        )
    return layouts
