"""A quantised weight as the model's own code sees it: a weight, which is dequantised where it is used.

Whatever a module does with a weight works, since all but a few functions are given the dequantised one: it is made
for one call and let go after it. What autograd would keep of it for the backward is made again there, so that no
weight in working precision lives from forward to backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import rpft.model.quant_kernels  # noqa: F401  (registers the operations)
from rpft.model.quant import PackedWeight, Parts

_DESCRIBE = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf", "grad_fn", "layout", "is_cuda")
} | {
    getattr(torch.Tensor, name)
    for name in ("dim", "size", "numel", "is_floating_point", "is_complex", "__len__", "element_size")
}
"""What is answered without the weight's values."""

_ITSELF = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
"""What of a frozen weight is that weight."""


class QuantizedWeight(torch.Tensor):
    """A frozen weight that is held as its parts. ``opened`` takes note of what is dequantised."""

    packed: PackedWeight
    parts: Parts
    opened: OpenedWeights

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight], packed: PackedWeight, parts: Parts, opened: OpenedWeights
    ) -> QuantizedWeight:
        weight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, packed.shape, dtype=packed.dtype, device=parts[""].device
        )
        weight.packed, weight.parts, weight.opened = packed, parts, opened
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.set_.source_Tensor, f"{func} reached a quantised weight"
        return args[0]  # a parametrization (peft's, of experts) sets a weight to itself

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ITSELF:
            return args[0]
        if func is torch.Tensor.__getitem__ and _is_number(args[1]) and len(args[0].packed.shape) == 3:
            return args[0].expert(args[1])
        if func is F.linear and isinstance(args[1], cls) and args[1].packed.kind != "nf4":
            return args[1].row_scaled_linear(args[0], *args[2:], **kwargs)
        args, kwargs = pytree.tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def dequantized(self) -> torch.Tensor:
        """The weight in working precision."""
        return self.opened.note(self._dequantize)

    def _dequantize(self) -> torch.Tensor:
        packed, parts = self.packed, self.parts
        if packed.kind != "nf4":
            return torch.ops.rpft.dequantize_rows(parts[""], parts[".scale"], packed.dtype)
        absmax = parts[".absmax"]
        if packed.nested:
            nested = (parts[f".nested_{name}"] for name in ("absmax", "quant_map", "offset"))
            absmax = torch.ops.rpft.nested_absmax(absmax, *nested)
        levels = parts[".quant_map"]
        return torch.ops.rpft.dequantize_blocks(parts[""], absmax, levels, packed.shape, packed.dtype)

    def expert(self, number: int | torch.Tensor) -> QuantizedWeight:
        """One of the experts, without the others being dequantised."""
        packed = PackedWeight(self.packed.kind, self.packed.shape[1:], self.packed.dtype, self.packed.nested)
        parts = {s: part if s.endswith("quant_map") else part[number] for s, part in self.parts.items()}
        return QuantizedWeight(packed, parts, self.opened)

    def row_scaled_linear(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``F.linear`` as torchao runs it: for int8 the scales come after the product, the bias always does."""
        if self.packed.kind == "int8":
            values = self.opened.note(lambda: torch.ops.rpft.dequantize_rows(self.parts[""], None, hidden.dtype))
            output = F.linear(hidden, values) * self.parts[".scale"].to(hidden.dtype).flatten()
        else:
            output = F.linear(hidden, self.dequantized())
        return output if bias is None else output + bias


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and index.dtype in (torch.int32, torch.int64)
    return isinstance(index, int) and not isinstance(index, bool)


class _Again(NamedTuple):
    """In the place of a dequantised weight that autograd saves: how to make it, and which view of it was saved."""

    make: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class OpenedWeights:
    """Knows which tensors are dequantised weights, while one forward pass runs."""

    def __init__(self) -> None:
        # The weak reference keeps the storage's address, not its memory: nobody else can get that address.
        self._makers: dict[int, tuple[StorageWeakRef, Callable[[], torch.Tensor]]] = {}

    def note(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` gives; the same again for a backward."""
        tensor = make()
        reference = StorageWeakRef(tensor.untyped_storage())
        self._makers[reference.cdata] = (reference, make)
        return tensor

    def made_again(self) -> AbstractContextManager[Any]:
        """In this context autograd saves no dequantised weight."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Again:
        found = self._makers.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return _Again(found[1], tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: torch.Tensor | _Again) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    weight = saved.make()
    for view in (weight, weight.transpose(-2, -1)):
        if view.size() == saved.size and view.stride() == saved.stride and saved.offset == 0:
            return view
    return weight.as_strided(saved.size, saved.stride, saved.offset)


def open_weights(
    weights: Mapping[str, torch.Tensor], packed: Mapping[str, PackedWeight]
) -> tuple[dict[str, torch.Tensor], OpenedWeights]:
    """``weights`` by name with the parts of each of ``packed`` taken together as one weight."""
    opened = OpenedWeights()
    whole = dict(weights)
    for name, description in packed.items():
        parts = {suffix: whole.pop(name + suffix) for suffix in description.part_shapes()}
        whole[name] = QuantizedWeight(description, parts, opened)
    return whole, opened
