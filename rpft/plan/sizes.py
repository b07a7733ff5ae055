"""Sizes of a worker's fixed buffers, from the layouts and the stages of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rpft.model.layout import LayerLayout
from rpft.plan.plan import Plan, Stage


@dataclass(frozen=True)
class WorkerSizes:
    """Sizes of a worker's fixed buffers."""

    weight_bytes: int
    gradient_elements: int
    boundary_bytes: int
    gradient_dtype: torch.dtype
    """Of the host gradients."""
    kept_bytes: int
    """What a block's forward keeps for one microbatch beside its input."""
    resident_bytes: int
    """Frozen weights that stay."""

    @property
    def total_bytes(self) -> int:
        """Device memory of all fixed buffers: two of each, one in use, one on its way; and of what stays.

        Of gradients that are rounded on their way the one in use is float32, the one on its way is not.
        """
        gradients = self.gradient_elements * (4 + self.gradient_dtype.itemsize)
        twice = self.weight_bytes + 2 * self.boundary_bytes + self.kept_bytes
        return 2 * twice + gradients + self.resident_bytes


def region_starts(layouts: list[LayerLayout], stage: Stage) -> dict[int, tuple[int, int]]:
    """For each layer of a stage where its region starts: (weight bytes, gradient elements)."""
    starts, weight, gradient = {}, 0, 0
    for layer in stage.layers:
        starts[layer] = (weight, gradient)
        weight += layouts[layer].region_bytes
        gradient += layouts[layer].grad_elements
    return starts


def worker_sizes(
    layouts: list[LayerLayout], plan: Plan, boundary_bytes: int, gradient_dtype: torch.dtype, max_tokens: int
) -> WorkerSizes:
    """What the stages of a plan ask of a worker. ``max_tokens``: of the largest microbatch."""

    def largest(stages: tuple[Stage, ...], size: Callable[[LayerLayout], int]) -> int:
        return max((sum(size(layouts[i]) for i in stage.layers) for stage in stages), default=0)

    return WorkerSizes(
        weight_bytes=largest(plan.forward + plan.backward, lambda layout: layout.region_bytes),
        gradient_elements=largest(plan.backward, lambda layout: layout.grad_elements),
        boundary_bytes=boundary_bytes,
        gradient_dtype=gradient_dtype,
        kept_bytes=plan.keep_bytes_per_token * max_tokens,
        resident_bytes=sum(layouts[layer].frozen_bytes for layer in plan.resident),
    )
