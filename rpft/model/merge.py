"""Adapters added into the weights that they stand beside, a layer at a time, and what that changes in the logits.

Merged in float32 by peft's own layers and rounded once. A merge holds one layer as read, its merged copy, and the
float32 copy of one weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rpft.model.adapters import ADAPTER, plain_name
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.layer_reader import LayerReader
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Drift:
    """How far the logits of a merged model are from those of base and adapter side by side, on some tokens."""

    max_abs: float
    mean_abs: float
    largest: float
    """The largest of base and adapter's logits, for comparison."""
    top1_agreement: float
    """Share of the tokens after which the same token is the likeliest."""
    tokens: int


class _Adapted(NamedTuple):
    """A module with an adapter, and the full name of the weight that the adapter adds to."""

    path: str
    module: Any
    weight: str


class Merge:
    """A base model with adapters, and the plain model that it is merged into, layer by layer."""

    def __init__(self, skeleton: Skeleton, layouts: list[LayerLayout]) -> None:
        """``skeleton``: with adapters, or without: then nothing is added to anything."""
        self._skeleton, self._layouts = skeleton, layouts
        self._adapted = list(_adapted(skeleton.model))
        self._shared = {
            id(skeleton.model.get_parameter(binding.name))
            for layout in layouts
            for binding in layout.bindings
            if binding.name not in layout.own
        }
        """Parameters that several layers use."""

    @property
    def unties(self) -> bool:
        """Whether an adapter stands at one use of a tied weight: merged, the uses have different weights."""
        return any(id(self._skeleton.model.get_parameter(a.weight)) in self._shared for a in self._adapted)

    def run(
        self,
        plain: Skeleton,
        reader: LayerReader,
        trained: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        probe_ids: torch.Tensor | None = None,
    ) -> Iterator[tuple[Tensors, Drift | None]]:
        """Each layer's merged tensors in ``dtype``, by their names in ``plain``; the drift with the last one's.

        ``plain``: the model without adapters, untied if the merge unties. ``reader``: of the base model.
        ``trained``: by names of the model with adapters. ``probe_ids``, [1, tokens]: what both models are run on,
        on the CPU, layer by layer; without them there is no drift.
        """
        layouts = build_layers(plain, dtype)
        probe = None if probe_ids is None else _Probe(self._skeleton, plain, layouts, dtype, probe_ids)
        held: dict[int, torch.Tensor] = {}
        for layer in range(len(self._layouts)):
            uses = self._uses(layer, reader.read(layer), trained, held)
            merged = {plain_name(name): tensor for name, tensor in uses.items() if not _is_adapter_s(name)}
            for adapted in self._adapted:
                if adapted.weight in uses:
                    merged[plain_name(adapted.weight)] = _merged(adapted, uses)
            merged = {b.name: merged[b.name].to(b.dtype) for b in layouts[layer].bindings}
            drift = None
            if probe is not None:
                beside = {b.name: uses[b.name].to(b.dtype) for b in self._layouts[layer].bindings}
                drift = probe.step(layer, beside, merged)
            yield {name: merged[name] for name in layouts[layer].own}, drift

    def _uses(
        self, layer: int, base: Tensors, trained: Mapping[str, torch.Tensor], held: dict[int, torch.Tensor]
    ) -> Tensors:
        """What ``layer`` with its adapters uses, by full name. ``held``: shared tensors of the layers before."""
        uses: Tensors = {}
        for spec, _ in self._layouts[layer].own.values():
            name = spec.checkpoint_name
            uses[spec.name] = trained[spec.name] if spec.name in trained or name is None else base[name]
        for binding in self._layouts[layer].bindings:
            if binding.name not in uses:
                uses[binding.name] = held[id(self._skeleton.model.get_parameter(binding.name))]
        if self._shared:
            parameters = dict(self._skeleton.model.named_parameters(remove_duplicate=False))
            held |= {id(parameters[n]): t for n, t in uses.items() if id(parameters.get(n)) in self._shared}
        return uses


class _Probe:
    """Both models on their way through the layers."""

    def __init__(
        self,
        skeleton: Skeleton,
        plain: Skeleton,
        plain_layouts: list[LayerLayout],
        plain_dtype: torch.dtype,
        ids: torch.Tensor,
    ) -> None:
        cpu, nothing = torch.device("cpu"), torch.empty(0, dtype=torch.long)
        self._last = len(plain_layouts) - 1
        self._batch = DeviceBatch(ids, None, nothing, nothing)
        self._functions = [
            LayerFunctions(skeleton, cpu, skeleton.model.dtype),
            LayerFunctions(plain, cpu, plain_dtype),
        ]
        for functions in self._functions:
            functions.train(False)
        self._hidden: list[torch.Tensor | None] = [None, None]

    def step(self, layer: int, beside: Tensors, merged: Tensors) -> Drift | None:
        """Runs ``layer``; the last one gives the drift."""
        both = zip(self._functions, self._hidden, (beside, merged), strict=True)
        with torch.no_grad():
            if layer < self._last:
                self._hidden = [f.forward(layer, hidden, w, self._batch, None) for f, hidden, w in both]
                return None
            logits = [f.logits(hidden, w, self._batch).float() for f, hidden, w in both if hidden is not None]
        theirs, ours = logits
        away = (ours - theirs).abs()
        agree = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        return Drift(
            away.max().item(), away.mean().item(), theirs.abs().max().item(), agree.item(), ours[..., 0].numel()
        )


def _is_adapter_s(name: str) -> bool:
    return ".lora_" in name


def _adapted(model: Any) -> Iterator[_Adapted]:
    if not any(_is_adapter_s(name) for name, _ in model.named_parameters()):
        return  # importing peft takes a second
    from peft.tuners.lora import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            holder, name = module, path
            while isinstance(holder, LoraLayer):  # adapters of several parameters of one module are nested
                holder, name = holder.base_layer, f"{name}.base_layer"
            yield _Adapted(path, module, f"{name}.{getattr(module, 'parameter_name', 'weight')}")


def _merged(adapted: _Adapted, uses: Tensors) -> torch.Tensor:
    """The weight with its adapter added, float32."""
    module = copy.deepcopy(adapted.module)  # on meta: nothing of size
    leaf = adapted.weight.rpartition(".")[2]
    _put(module.get_base_layer(), leaf, uses[adapted.weight].float().clone())
    prefix = f"{adapted.path}."
    for name, tensor in uses.items():
        part = name.removeprefix(prefix)
        if name.startswith(prefix) and part.startswith("lora_"):
            parent, _, part_leaf = part.rpartition(".")
            _put(module.get_submodule(parent), part_leaf, tensor.float())
    module.merge(adapter_names=[ADAPTER])
    return getattr(module.get_base_layer(), leaf).detach()


def _put(holder: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(holder, name, torch.nn.Parameter(tensor, requires_grad=False))
