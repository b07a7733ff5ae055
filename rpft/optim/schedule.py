"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no state of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The learning rate of step 1..num_steps.

    Warm-up rises linearly and reaches the peak at its last step. Then, over the remaining steps: ``constant``
    stays; ``linear`` and ``cosine`` fall towards ``min_ratio`` of the peak, which the step after the last would
    have, so that no step is spent at zero; ``wsd`` stays and falls linearly over the last ``decay_ratio`` of all.
    """

    name: str
    peak: float
    num_steps: int
    warmup_ratio: float = 0.0
    min_ratio: float = 0.0
    decay_ratio: float = 0.2

    @property
    def warmup_steps(self) -> int:
        return math.ceil(self.warmup_ratio * self.num_steps)

    def __call__(self, step: int) -> float:
        """The learning rate of ``step``, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * _SHAPES[self.name](self, step)

    def fall(self, step: int, start: int, shape: Callable[[float], float]) -> float:
        """1 up to ``start``, ``min_ratio`` one step after the last, ``shape`` in between."""
        if step <= start:
            return 1.0
        share = (step - start) / (self.num_steps + 1 - start)
        return self.min_ratio + (1.0 - self.min_ratio) * shape(share)


def _linear(share: float) -> float:
    return 1.0 - share


def _cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda s, step: 1.0,
    "linear": lambda s, step: s.fall(step, s.warmup_steps, _linear),
    "cosine": lambda s, step: s.fall(step, s.warmup_steps, _cosine),
    "wsd": lambda s, step: s.fall(
        step, max(s.warmup_steps, s.num_steps - math.ceil(s.decay_ratio * s.num_steps)), _linear
    ),
}
