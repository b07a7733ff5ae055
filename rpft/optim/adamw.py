"""AdamW on one layer's flat host buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rpft.model.host_store import HostLayer
from rpft.optim.kernels import Weights
from rpft.optim.one_pass import OnePass

BorrowedGradient = tuple[slice, torch.Tensor]
"""A part of a layer's trained elements, and the gradient of another layer's use of it."""


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101); decay on matrices only."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

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
    ) -> None:
        """One update of masters and moments from the layer's gradient and ``borrowed``, over ``gradient_divisor``.

        ``updates_before`` is the number of updates that the layer has had, for the bias correction. ``source`` is
        the copy of the working weights that belongs to the masters, ``target`` the one that will.
        """
        before, after = layer.copy(source), layer.copy(target)
        for part, gradients in gradient_parts(layer, borrowed):
            kernels.adamw_pass(
                gradients,
                Weights(before[part], after[part], layer.master[part] if len(layer.master) else None),
                layer.exp_avg[part],
                layer.exp_avg_sq[part],
                learning_rate=learning_rate,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.weight_decay if part.start < layer.layout.num_decayed else 0.0,
                updates_before=updates_before,
                gradient_divisor=gradient_divisor,
            )
        layer.latest = target


def gradient_parts(
    layer: HostLayer, borrowed: Sequence[BorrowedGradient]
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """The layer's trained elements in parts that decay alike, each with its gradients, which are to be added."""
    cuts = {0, layer.layout.num_decayed, layer.layout.num_trained}
    for part, _ in borrowed:
        cuts |= {part.start, part.stop}
    ordered = sorted(cuts)
    for start, stop in pairwise(ordered):
        uses = [
            gradient[start - part.start : stop - part.start]
            for part, gradient in borrowed
            if part.start <= start < part.stop
        ]
        yield slice(start, stop), [layer.gradient[start:stop], *uses]
