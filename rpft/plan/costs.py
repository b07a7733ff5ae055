"""Relative cost of each layer: measured, or from the shapes of its weights where nothing was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.profile import LayerProfile


@dataclass(frozen=True)
class LayerCost:
    """Compute of one layer and what its gradients add: multiply-adds a token, or seconds a microbatch."""

    forward: float
    backward: float
    """Without the recompute: twice the forward for trained weights, once for frozen ones."""

    @property
    def with_recompute(self) -> float:
        return self.forward + self.backward


def measured_costs(profiles: Sequence[LayerProfile], keep_bytes_per_token: int = 0) -> list[LayerCost]:
    """One cost a layer, in seconds for one microbatch, where blocks keep so much for their backward."""
    costs = []
    for profile in profiles:
        share = min(share for size, share in profile.keep_options if size <= keep_bytes_per_token)
        costs.append(
            LayerCost(profile.forward_seconds, share * profile.backward_seconds - profile.forward_seconds)
        )
    return costs


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
