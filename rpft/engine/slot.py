"""A slot: one stage for all microbatches of a round on one worker, and every event that it meets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch

from rpft.engine.buffers import Boundary, Reading
from rpft.engine.streams import Event
from rpft.plan.plan import Stage


class SlotKind(Enum):
    FORWARD = "forward"
    FUSED = "fused"
    BACKWARD = "backward"
    LOSS = "loss"
    """The fused stage without gradients: evaluation."""


@dataclass(frozen=True, eq=False)
class HostBatch:
    """One microbatch on the host; shapes as in ``DeviceBatch``."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    trained_at: torch.Tensor
    targets: torch.Tensor

    @property
    def trained_tokens(self) -> int:
        return self.targets.numel()


@dataclass(slots=True)
class GradientCopy:
    """One layer's gradient sum on its way between the host store and a slot."""

    host: torch.Tensor
    """The layer's host gradient."""
    start: int
    """Where it starts in the slot's accumulator, in elements."""
    num_own: int
    """Elements from the start that are of the layer's own tensors; borrowed ones follow."""
    square: torch.Tensor | None
    """After the last round: the place in host memory for the sum of squares of the own part, float64 scalar."""
    after: Event
    """A later round: the sum of the round before has landed. The first: the optimizer has read the last step's."""
    goes_on: bool
    """Whether the sum of the round before is brought up and added to, so that all rounds are one sum in order."""
    landed: Event = field(default_factory=Event)


@dataclass(slots=True)
class Task:
    """What a slot does with one microbatch."""

    batch: HostBatch
    key: int | None
    """Places the dropout; None turns it off."""
    inputs: dict[int, Reading] = field(default_factory=dict)
    """Layer to its input; for a backward slot one a recomputed segment."""
    outputs: dict[int, Boundary] = field(default_factory=dict)
    """Forward: layer to the boundary that becomes the input of that layer."""
    kept_outputs: dict[int, Boundary] = field(default_factory=dict)
    """Forward: block to the boundary for what it keeps for its backward."""
    kept_inputs: dict[int, Reading] = field(default_factory=dict)
    """Backward: block to what its forward kept."""
    grad_input: Reading | None = None
    """Backward: the gradient of the stage's output."""
    grad_output: Boundary | None = None
    """Fused and backward: the gradient of the stage's input; None where nothing below is trained."""


@dataclass(slots=True)
class WeightCopy:
    """One run of host weights to be uploaded: source bytes, place in the weight buffer, and what it waits for."""

    source: torch.Tensor
    start: int
    written: Event
    on_disk: bool
    """Whether the source is a file's mapping, whose bytes may have to be waited for. It is never written."""


@dataclass
class Slot:
    """One entry of the run, complete: a worker needs nothing else to carry it out."""

    number: int
    kind: SlotKind
    stage: Stage
    segments: tuple[Stage, ...]
    tasks: list[Task]
    weights: list[WeightCopy]
    uploaded: Event
    gradients: list[GradientCopy]
    losses: torch.Tensor | None
    """Fused and loss slots: float32 host tensor [microbatches] for the loss sums."""
    losses_ready: Event = field(default_factory=Event)
    balanced: tuple[int, ...] = ()
    """Fused and backward: layers of the stage whose routers have a load-balancing loss."""
    router_losses: torch.Tensor | None = None
    """float32 host tensor [microbatches, balanced layers] for these, each times its weight."""
    router_losses_ready: Event = field(default_factory=Event)

    @property
    def gradient_elements(self) -> int:
        """Elements of the gradients of all layers of the stage."""
        return sum(copy.host.numel() for copy in self.gradients)

    @cached_property
    def _name(self) -> str:
        return f"slot {self.number} ({self.kind.value} stage {self.stage})"

    def __str__(self) -> str:
        return self._name  # asked for by every task
