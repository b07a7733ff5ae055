"""Relative cost of each layer, from the shapes of its weights: what stands in until layers are measured."""

from __future__ import annotations

from dataclasses import dataclass

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton


@dataclass(frozen=True)
class LayerCost:
    """Compute of one layer for one token, in multiply-adds, and what its gradients add."""

    forward: float
    backward: float
    """Without the recompute: twice the forward for trained weights, once for frozen ones."""

    @property
    def with_recompute(self) -> float:
        return self.forward + self.backward


def layer_costs(layouts: list[LayerLayout], skeleton: Skeleton) -> list[LayerCost]:
    """One cost a layer. A product costs its weight's elements; an expert's only the share of tokens it sees."""
    config = skeleton.model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    used = getattr(config, "num_experts_per_tok", None) or 1
    costs = []
    for layout in layouts:
        forward = frozen = 0.0
        for binding in layout.bindings:
            if len(binding.shape) < 2 or layout.layer == 0:  # a lookup costs next to nothing
                continue
            size = float(binding.num_elements)
            if len(binding.shape) == 3:
                size *= min(1.0, used / experts)
            forward += size
            frozen += size if binding.grad_offset is None else 0.0
        costs.append(LayerCost(forward, 2 * forward - frozen))
    return costs
