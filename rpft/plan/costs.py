"""Relative cost of each layer: measured, or from the shapes of its weights where nothing was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpft.model.layout import LayerLayout
    from rpft.model.skeleton import Skeleton
    from rpft.plan.profile import LayerProfile


@dataclass(frozen=True)
class LayerCost:
    """Compute of one layer and what its gradients add: multiply-adds a token, or seconds a microbatch."""

    forward: float
    backward: float
    """Without the recompute: twice the forward for trained weights, once for frozen ones."""
    spared: float = 0.0
    """Of both, what a backward slot is spared by what the forward kept; below 0 what it does more.

    Not of the fused stage, which keeps all anyway.
    """
    fused: float = 0.0
    """What it takes longer than both in the fused stage, where forward and backward are two graphs."""

    @property
    def with_recompute(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerLoad:
    """What one layer asks of workers, links and optimizer: times of a microbatch, bytes of a slot."""

    forward: float
    backward: float
    """Of recompute and backward as one, or of the backward alone where ``recompute`` is not 0."""
    recompute: float = 0.0
    """What of a backward slot needs no gradient and can start before it comes."""
    spared: float = 0.0
    """See ``LayerCost``."""
    fused: float = 0.0
    """See ``LayerCost``."""
    weight_bytes: int = 0
    frozen_bytes: int = 0
    """Of them those that a worker could hold all the time."""
    gradient_bytes: int = 0
    num_trained: int = 0
    lenders: tuple[int, ...] = ()
    """The other layers whose weights it borrows, and whose update it waits for."""


def layer_loads(
    costs: Sequence[LayerCost], layouts: Sequence[LayerLayout] | None = None, gradient_itemsize: int = 0
) -> list[LayerLoad]:
    """One load a layer: costs in seconds with the bytes of ``layouts``, or compute alone where there are none."""
    if layouts is None:
        return [LayerLoad(cost.forward, cost.with_recompute, fused=cost.fused) for cost in costs]
    return [
        LayerLoad(
            cost.forward,
            cost.with_recompute,
            spared=cost.spared,
            fused=cost.fused,
            weight_bytes=layout.region_bytes,
            frozen_bytes=layout.frozen_bytes,
            gradient_bytes=layout.grad_elements * gradient_itemsize,
            num_trained=layout.num_trained,
            lenders=tuple({piece.layer for piece in layout.weight_pieces} - {layout.layer}),
        )
        for cost, layout in zip(costs, layouts, strict=True)
    ]


def measured_costs(
    profiles: Sequence[LayerProfile], keep_bytes_per_token: int = 0, recompute: str = "layer"
) -> list[LayerCost]:
    """One cost a layer, in seconds for one microbatch, where blocks keep so much for their backward.

    Recomputed with others of its ``stage``, a layer that runs as a graph takes what it does in the fused stage:
    only by ``layer`` are recompute and backward one graph, without what feeds no gradient.
    """
    costs = []
    for profile in profiles:
        forward, backward, left = profile.forward_seconds, profile.backward_seconds, profile.backward_seconds
        if recompute == "layer":
            left *= min(share for size, share in profile.keep_options if size <= keep_bytes_per_token)
        else:
            left = profile.fused_seconds
        costs.append(LayerCost(forward, backward - forward, backward - left, profile.fused_seconds - backward))
    return costs


def layer_costs(layouts: list[LayerLayout], skeleton: Skeleton) -> list[LayerCost]:
    """One cost a layer. A product costs its weight's elements; an expert's only the share of tokens it sees."""
    config = skeleton.model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    used = getattr(config, "num_experts_per_tok", None) or 1
    costs = []
    for layout in layouts:
        forward = frozen = 0.0
        for shape, trained in layout.matrices if layout.layer else ():  # a lookup costs next to nothing
            size = float(math.prod(shape))
            if len(shape) == 3:
                size *= min(1.0, used / experts)
            forward += size
            frozen += 0.0 if trained else size
        costs.append(LayerCost(forward, 2 * forward - frozen))
    return costs


def scaled(profile: LayerProfile, share: float) -> LayerProfile:
    """``profile`` for a microbatch of so many times the tokens: everything grows with them."""
    return replace(
        profile,
        forward_seconds=profile.forward_seconds * share,
        backward_seconds=profile.backward_seconds * share,
        kept_seconds=None if profile.kept_seconds is None else profile.kept_seconds * share,
        forward_bytes=round(profile.forward_bytes * share),
        backward_bytes=round(profile.backward_bytes * share),
        kept_bytes=round(profile.kept_bytes * share),
        kept_backward_bytes=round(profile.kept_backward_bytes * share),
    )
