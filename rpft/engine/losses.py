"""Loss sums on their way from the workers: where they will lie, when they are there, and what they add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from rpft.engine.streams import Event


@dataclass
class Losses:
    """Loss sums of a step or an evaluation, complete when all of ``ready`` are."""

    values: list[torch.Tensor] = field(default_factory=list)
    """A float32 host tensor [microbatches] a round; of routers [microbatches, layers] a slot."""
    ready: list[Event] = field(default_factory=list)

    def expect(self, shape: tuple[int, ...], ready: Event) -> torch.Tensor:
        """A tensor that will hold more of them once ``ready`` is complete."""
        self.values.append(torch.zeros(shape))
        self.ready.append(ready)
        return self.values[-1]

    def total(self) -> float:
        """The sum over all microbatches, in order, in double precision."""
        return float(sum(value.double().sum() for value in self.values))

    def exact_total(self) -> float:
        """The sum, rounded once, whatever its order: which slots there are depends on the plan."""
        return math.fsum(each for value in self.values for each in value.flatten().tolist())
