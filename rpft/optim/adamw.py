"""AdamW on one layer's flat host buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rpft.model.adapters import learns_faster
from rpft.model.dropout import mix
from rpft.model.host_layer import HostLayer
from rpft.model.layout import ALIGNMENT_ELEMENTS, align
from rpft.model.moments import Moments
from rpft.optim.kernels import Part, Weights
from rpft.optim.one_pass import Numbers, OnePass

_ROUNDING = 0x6D6F6D656E7473
"""What these draws have for themselves among those from one seed."""

BorrowedGradient = tuple[slice, torch.Tensor]
"""A part of a layer's trained elements, and the gradient of another layer's use of it."""


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101); decay on matrices only."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    fast_ratio: float = 1.0
    """Learning rate of LoRA+'s faster parameters over that of the others."""
    seed: int = 0
    """Of the run, for what is rounded by chance."""

    def update(
        self,
        kernels: OnePass,
        layer: HostLayer,
        borrowed: Sequence[BorrowedGradient],
        learning_rate: float,
        updates_before: int,
        gradient_divisor: float,
        source: int = 0,
        target: int = 0,
        piece: tuple[slice, Moments] | None = None,
    ) -> None:
        """One update of masters and moments from the layer's gradient and ``borrowed``, over ``gradient_divisor``.

        ``updates_before`` is the number of updates that the layer has had, for the bias correction. ``source`` is
        the copy of the working weights that belongs to the masters, ``target`` the one that will. ``piece``: which
        of the layer's trained elements, and their moments; None for all, whose moments lie in RAM.
        """
        LayerUpdate(self, kernels, layer, borrowed, source, target, piece)(
            learning_rate, updates_before, gradient_divisor
        )


class LayerUpdate:
    """One layer's update, or that of a piece, of which all that depends on where things lie is found once."""

    def __init__(
        self,
        algorithm: AdamW,
        kernels: OnePass,
        layer: HostLayer,
        borrowed: Sequence[BorrowedGradient],
        source: int,
        target: int,
        piece: tuple[slice, Moments] | None = None,
    ) -> None:
        """See ``AdamW.update``."""
        self._algorithm, self._layer, self._target = algorithm, layer, target
        before, after = layer.copy(source), layer.copy(target)
        whole, moments = piece or (slice(0, layer.layout.num_trained), layer.moments)
        fast = fast_parts(layer) if algorithm.fast_ratio != 1.0 else []
        parts: list[Part] = []
        self._ways: list[tuple[float, float]] = []
        """(ratio of the learning rate, weight decay) of each part."""
        for part, gradients in gradient_parts(layer, borrowed, fast, whole):
            if part.start == part.stop:
                continue
            weights = Weights(before[part], after[part], layer.master[part] if len(layer.master) else None)
            parts.append(Part(gradients, weights, moments[part.start - whole.start : part.stop - whole.start]))
            ratio = algorithm.fast_ratio if any(f.start <= part.start < f.stop for f in fast) else 1.0
            decay = algorithm.weight_decay if part.start < layer.layout.num_decayed else 0.0
            self._ways.append((ratio, decay))
        self._update = kernels.bind(parts)

    def __call__(self, learning_rate: float, updates_before: int, gradient_divisor: float) -> None:
        betas, eps = self._algorithm.betas, self._algorithm.eps
        numbers = {
            (ratio, decay): Numbers(learning_rate * ratio, betas, eps, decay, updates_before, gradient_divisor)
            for ratio, decay in {*self._ways}
        }
        # A layer's updates are counted in checkpoints, so that a resumed run draws what the unbroken one does.
        rounding_key = mix(self._algorithm.seed, _ROUNDING, updates_before, self._layer.layout.layer)
        self._update([numbers[way] for way in self._ways], rounding_key)
        self._layer.latest = self._target


def fast_parts(layer: HostLayer) -> list[slice]:
    """The layer's trained elements that learn faster with LoRA+, in order; neighbours are one part."""
    parts: list[slice] = []
    for spec, byte_offset in layer.layout.own.values():
        if not spec.trained or not learns_faster(spec.name, len(spec.shape)):
            continue
        start = byte_offset // spec.dtype.itemsize
        stop = start + align(spec.num_elements, ALIGNMENT_ELEMENTS)
        if parts and parts[-1].stop == start:
            start = parts.pop().start
        parts.append(slice(start, stop))
    return parts


def gradient_parts(
    layer: HostLayer,
    borrowed: Sequence[BorrowedGradient],
    apart: Sequence[slice] = (),
    within: slice | None = None,
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """The layer's trained elements in parts that decay alike, each with its gradients, which are to be added.

    No part is partly in one of ``apart``; each begins and ends where a tensor's place does, or ``within``, which
    says of which elements, None of all.
    """
    cuts = {0, layer.layout.num_decayed, layer.layout.num_trained}
    for part in [*(part for part, _ in borrowed), *apart]:
        cuts |= {part.start, part.stop}
    if within is not None:
        cuts = {within.start, within.stop, *(cut for cut in cuts if within.start < cut < within.stop)}
    ordered = sorted(cuts)
    for start, stop in pairwise(ordered):
        uses = [
            gradient[start - part.start : stop - part.start]
            for part, gradient in borrowed
            if part.start <= start < part.stop
        ]
        yield slice(start, stop), [layer.gradient[start:stop], *uses]
