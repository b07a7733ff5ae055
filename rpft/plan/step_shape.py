"""What of a run decides how long its steps take, beside its plan and the machine's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpft.plan.costs import LayerLoad

_SLOT_SECONDS = 3e-4
"""What it takes to begin and end a slot."""


@dataclass(frozen=True)
class StepShape:
    """What of a run decides how its steps go, beside the plan."""

    loads: Sequence[LayerLoad]
    tokens: int
    """Of a microbatch."""
    boundary_bytes: int
    num_workers: int
    rounds: int
    delayed: bool
    hop: float = 0.0
    """From the end of a microbatch in one slot to its start in the next, beside what the links take."""
    slot_seconds: float = _SLOT_SECONDS
    speeds: Sequence[float] | None = None
    """Of each worker, where they differ: how many times as fast as the loads say."""

    @property
    def mixed(self) -> bool:
        """Whether workers differ in speed."""
        return self.speeds is not None and len(set(self.speeds)) > 1
