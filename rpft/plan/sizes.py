"""Sizes of a worker's fixed buffers, from the layouts and the stages of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rpft.model.layout import LayerLayout
from rpft.plan.plan import Plan, Stage

RESULTS_IN_FLIGHT = 4
"""Results of compute that a worker holds at most until they are down: enough to hide the copies behind compute."""


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


class Sums:
    """Of a value that each layer has, over consecutive layers."""

    def __init__(self, values: Iterable[int]) -> None:
        self._up_to = [0, *accumulate(values)]

    def of(self, stage: Stage) -> int:
        """Over the layers of ``stage``."""
        return self._up_to[stage.last + 1] - self._up_to[stage.first]

    def largest(self, stages: Iterable[Stage]) -> int:
        """Of any of ``stages``; 0 where there are none."""
        up_to = self._up_to
        return max((up_to[last + 1] - up_to[first] for first, last in stages), default=0)


class WorkerSizing:
    """Sizes of a worker's buffers for any plan of a model: what layers ask for is read once.

    ``max_tokens``: of the largest microbatch, whose hidden state takes ``boundary_bytes``.
    """

    def __init__(
        self, layouts: Sequence[LayerLayout], boundary_bytes: int, gradient_dtype: torch.dtype, max_tokens: int
    ) -> None:
        self._gradient_dtype, self._max_tokens = gradient_dtype, max_tokens
        self._boundary_bytes = boundary_bytes + max_tokens * max(layout.extra_input_bytes for layout in layouts)
        self._regions = Sums(layout.region_bytes for layout in layouts)
        self._gradients = Sums(layout.grad_elements for layout in layouts)
        self._choice_bytes = max(layout.choice_bytes(max_tokens) for layout in layouts)
        self._frozen = [layout.frozen_bytes for layout in layouts]

    def of(self, plan: Plan) -> WorkerSizes:
        """What the stages of ``plan`` ask of a worker."""
        return WorkerSizes(
            weight_bytes=self._regions.largest(plan.forward + plan.backward),
            gradient_elements=self._gradients.largest(plan.backward),
            boundary_bytes=self._boundary_bytes,
            gradient_dtype=self._gradient_dtype,
            kept_bytes=plan.keep_bytes_per_token * self._max_tokens + self._choice_bytes,
            resident_bytes=sum(self._frozen[layer] for layer in plan.resident),
        )


def worker_sizes(
    layouts: Sequence[LayerLayout], plan: Plan, boundary_bytes: int, gradient_dtype: torch.dtype, max_tokens: int
) -> WorkerSizes:
    """What the stages of one plan ask of a worker."""
    return WorkerSizing(layouts, boundary_bytes, gradient_dtype, max_tokens).of(plan)


def bytes_alone(layout: LayerLayout, gradient_dtype: torch.dtype) -> int:
    """What a stage of one layer takes of a worker that grows with the layer's weights."""
    gradients = layout.grad_elements * (4 + gradient_dtype.itemsize)
    return 2 * layout.region_bytes + gradients + layout.dequantized_bytes + layout.adapted_bytes


def keeping_layers(layouts: Sequence[LayerLayout], plan: Plan, first_trained: int) -> list[int]:
    """Blocks whose forward slot keeps something for the backward: as the plan says, or what their routers pick."""
    blocks = range(max(first_trained, 1), plan.fused.first)
    return [layer for layer in blocks if plan.keep_bytes_per_token or layouts[layer].choices]


def frozen_bytes_up(layouts: list[LayerLayout], plan: Plan, first_trained: int) -> int:
    """Bytes of frozen weights that the slots of one round bring up."""
    stages = [*plan.forward, *(stage for stage in plan.backward if stage.last >= first_trained)]
    total = 0
    for layer in (layer for stage in stages for layer in stage.layers):
        for piece in layouts[layer].weight_pieces:
            if piece.layer != layer or layer not in plan.resident:
                total += max(0, piece.stop - max(piece.start, layouts[piece.layer].frozen_start))
    return total


def boundary_bytes_on_host(
    plan: Plan, layouts: Sequence[LayerLayout], first_trained: int, boundary_bytes: int, max_tokens: int
) -> int:
    """Of all host buffers for what crosses between stages; a hidden state takes ``boundary_bytes``."""
    extra = [layout.extra_input_bytes for layout in layouts]
    if not any(extra):
        return boundary_buffers(plan, first_trained) * boundary_bytes
    total = 0
    for size in set(extra):
        count = boundary_buffers(plan, first_trained, [each == size for each in extra])
        total += count * (boundary_bytes + size * max_tokens)
    return total


def boundary_buffers(plan: Plan, first_trained: int, counted: Sequence[bool] | None = None) -> int:
    """Host buffers for hidden states and their gradients, as many as a round needs at once.

    ``counted``: for each layer whether inputs of it, and gradients of these, are; None: all are.
    What the controller does with the microbatches of a slot, one after the other, it does here with one of them:
    those that had their turn hold what is left after it, the others what was there before.
    """
    fused, backward = plan.fused, [stage for stage in plan.backward if stage.last >= first_trained]
    segments = {stage: [stage] if stage == fused else list(plan.segments(stage)) for stage in backward}
    for stage in segments:
        segments[stage] = [s for s in segments[stage] if s.last >= first_trained]
    later = Counter(segment.first for stage in backward[1:] for segment in segments[stage])
    starts = {stage.first for stage in plan.forward} | {fused.first}

    def counts(layer: int) -> bool:
        return counted is None or counted[layer]

    left: dict[int, int] = {}
    """Layer to the readings of its input that are to come."""
    live = most = 0

    def slot(read: Sequence[int], ends: int, begins: int) -> None:
        nonlocal live, most
        before, peak = live, live
        for layer in read:
            left[layer] -= 1
            live -= left[layer] == 0 and counts(layer)
        live += begins - ends
        peak = max(peak, live)
        most = max(most, (plan.num_microbatches - 1) * max(before, live) + peak)

    for stage in plan.forward:
        written = [n for n in range(stage.first + 1, stage.last + 2) if later[n] or n in starts]
        left.update({layer: later[layer] + (layer in starts) for layer in written})
        slot([stage.first] if stage.first > 0 else [], 0, sum(map(counts, written)))
    gradient = 0
    for stage in backward:
        passes_on = int(stage.first > first_trained and counts(stage.first))
        slot([s.first for s in segments[stage] if s.first > 0], gradient, passes_on)
        gradient = passes_on
    return most
