"""What every stream does in a step under a plan, as the simulator plays it: what a picture is drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rpft.plan.plan import Plan, Stage
from rpft.plan.pool import SlotTimes, SlotWork
from rpft.plan.rates import Rates
from rpft.plan.simulate import steps_warm, watched_steps
from rpft.plan.step_shape import StepShape

Stretch = tuple[float, float]
"""(start, end) in seconds since the run began."""


@dataclass(frozen=True)
class SlotPlayed:
    """One slot as it went. Lists have a stretch for each microbatch; those of no length are left out."""

    step: int
    """From 0."""
    round: int
    """Of its step."""
    slot: int
    """Of its round."""
    worker: int
    computed: list[Stretch]
    weights_up: list[Stretch]
    activations_up: list[Stretch]
    activations_down: list[Stretch]
    gradients_down: list[Stretch]


@dataclass(frozen=True)
class Playback:
    """A step in the long run, with as much of its neighbours as a picture wants."""

    plan: Plan
    num_workers: int
    step: int
    """The one that the rest is around."""
    start_seconds: float
    """When the step before is over; with exact updates their last gradient is then down."""
    end_seconds: float
    slots: list[SlotPlayed]
    updates: list[tuple[int, Stretch]]
    """(Step, when the optimizer works on it)."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of each slot of a round."""
        return self.plan.forward + self.plan.backward

    def kind(self, slot: int) -> str:
        """forward, fused or backward."""
        return slot_kind(self.plan, slot)


def slot_kind(plan: Plan, slot: int) -> str:
    """forward, fused or backward, for a slot of a round."""
    ahead = len(plan.forward)
    return "forward" if slot < ahead else "fused" if slot == ahead else "backward"


def play_back(plan: Plan, shape: StepShape, rates: Rates) -> Playback:
    """Plays steps until what starting up changes is over, one more to look at, and the one after it."""
    per_step = plan.num_slots * shape.rounds
    warm = int(steps_warm(np.array(per_step), shape.num_workers)) if shape.delayed else 1
    watcher = _Watcher(plan, shape, rates)
    ends = watched_steps(plan, shape, rates, warm + 2, watcher)
    first = 1 if not shape.delayed else 0  # an exact step begins with the update of the one before
    updates = [(number - first, stretch) for number, stretch in enumerate(watcher.updates)]
    return Playback(plan, shape.num_workers, warm, ends[warm - 1], ends[warm], watcher.slots, updates)


class _Watcher:
    def __init__(self, plan: Plan, shape: StepShape, rates: Rates) -> None:
        self.num_slots, self.per_step = plan.num_slots, plan.num_slots * shape.rounds
        self.input_up, self.output_down = shape.boundary_bytes / rates.up, shape.boundary_bytes / rates.down
        self.slots: list[SlotPlayed] = []
        self.updates: list[Stretch] = []

    def slot(self, number: int, worker: int | np.ndarray, work: SlotWork, times: SlotTimes) -> None:
        compute, recompute, upload = (float(part[0]) for part in (work.compute, work.recompute, work.upload))
        kept_up, kept_down = float(work.kept_up[0]), float(work.kept_down[0])
        computed, inputs = times.computed[:, 0].tolist(), times.inputs[:, 0].tolist()
        delivered, uploaded = times.delivered[:, 0].tolist(), float(times.uploaded[0])
        # What was kept comes up while its microbatch is computed, and goes down before the output does.
        pace = max(compute, kept_up)
        up = [(end - self.input_up, end) for end in inputs]
        up += [(end - pace, end - pace + kept_up - self.input_up) for end in computed if kept_up]
        landed, down = float(times.landed[0]), float(work.gradients_down[0])
        self.slots.append(
            SlotPlayed(
                step=number // self.per_step,
                round=number % self.per_step // self.num_slots,
                slot=number % self.num_slots,
                worker=int(np.ravel(worker)[0]),
                computed=_with_length([(end - compute - recompute, end) for end in computed]),
                weights_up=_with_length([(uploaded - upload, uploaded)]),
                activations_up=_with_length(up),
                activations_down=_with_length([(end - self.output_down - kept_down, end) for end in delivered]),
                gradients_down=_with_length([(landed - down, landed)]),
            )
        )

    def update(self, begun: np.ndarray, written: np.ndarray) -> None:
        self.updates.append((float(begun[0]), float(written[0])))


def _with_length(stretches: list[Stretch]) -> list[Stretch]:
    return [stretch for stretch in stretches if stretch[1] > stretch[0]]
