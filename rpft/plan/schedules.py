"""Schedules side by side: GPipe, 1F1B, interleaved 1F1B, looped breadth-first, swapped stages, and RoundPipe.

All are slots, a stage for some microbatches on a worker, played by the pool of plan/pool.py. They differ in who
runs a slot and in which order: elsewhere a stage is bound to a worker, in RoundPipe slots go to workers in turn.
Here uploads and hops take time and updates none; a step of this program's own engine, with its optimizer and all
its transfers, is `rpft.plan.simulate.step_seconds`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from rpft.plan.pool import Pool, SlotTimes, SlotWork

Dispatch = Literal["round_robin", "earliest_finish"]


@dataclass(frozen=True)
class StageTime:
    """What a stage takes, in any unit of time; all but the upload for one microbatch."""

    forward: float
    backward: float
    """Without the recompute."""
    recompute: float = 0.0
    upload: float = 0.0
    """Of its weights, each time that a worker takes it up; 0 where it stays."""


@dataclass(frozen=True)
class PlayedSlot:
    """One slot as it went."""

    worker: int
    name: str
    """F or B and the number of the stage, from 0."""
    microbatches: tuple[int, ...]
    busy: float
    """For one microbatch."""
    uploaded: float
    ends: tuple[float, ...]
    """When each microbatch was done."""


@dataclass
class Timeline:
    """All slots of a schedule."""

    num_workers: int
    slots: list[PlayedSlot] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """When the last slot ends."""
        return max((slot.ends[-1] for slot in self.slots), default=0.0)

    @property
    def busy(self) -> list[float]:
        """How long each worker computes."""
        total = [0.0] * self.num_workers
        for slot in self.slots:
            total[slot.worker] += slot.busy * len(slot.microbatches)
        return total

    @property
    def bubble(self) -> float:
        """Share of the workers' time until the last slot ends in which they do not compute."""
        return 1 - sum(self.busy) / (self.num_workers * self.makespan)

    def add(self, worker: int, name: str, microbatches: Sequence[int], busy: float, times: SlotTimes) -> None:
        ends = tuple(times.computed[:, 0].tolist())
        self.slots.append(PlayedSlot(worker, name, tuple(microbatches), busy, float(times.uploaded[0]), ends))


def breadth_first(
    stages: Sequence[StageTime],
    num_workers: int,
    num_microbatches: int,
    hop: float = 0.0,
    workers_per_switch: int = 1,
    switch_share: float = 0.0,
) -> Timeline:
    """Stage s stays with worker s mod N and runs all microbatches at once: all forwards, then all backwards.

    With a stage a worker this is GPipe (arXiv 1811.06965), with more the looped breadth-first schedule (arXiv
    2211.05953), and where stages have an upload, one that swaps bound stages as Mobius does (ASPLOS 2023).
    ``workers_per_switch``, ``switch_share``: links that cannot all carry uploads at once, as in `Pool`.
    """
    everything = tuple(range(num_microbatches))
    orders = []
    for worker in range(num_workers):
        own = range(worker, len(stages), num_workers)
        forward = [_Job("F", stage, everything) for stage in own]
        orders.append(forward + [_Job("B", stage, everything) for stage in reversed(own)])
    pool = Pool(num_workers, workers_per_switch=workers_per_switch, switch_share=switch_share)
    return _play_bound(orders, stages, hop, pool)


def one_f_one_b(
    stages: Sequence[StageTime], num_workers: int, num_microbatches: int, hop: float = 0.0
) -> Timeline:
    """A forward, a backward, in turn; interleaved (arXiv 2104.04473) where there are more stages than workers."""
    orders = [_alternating(worker, len(stages), num_workers, num_microbatches) for worker in range(num_workers)]
    return _play_bound(orders, stages, hop, Pool(num_workers))


def round_pipe(
    forward: Sequence[StageTime],
    backward: Sequence[StageTime],
    num_workers: int,
    num_microbatches: int,
    rounds: int = 1,
    hop: float = 0.0,
    *,
    speeds: Sequence[float] | None = None,
    dispatch: Dispatch = "round_robin",
    workers_per_switch: int = 1,
    switch_share: float = 0.0,
) -> Timeline:
    """Slots go to workers in turn (arXiv 2604.27085); ``backward[0]``, the fused stage, recomputes nothing.

    ``rounds``: of one step where updates are exact, of any number of steps in a row where they are late.
    ``speeds``: of each worker, where they differ: how many times as fast as the stages say. ``dispatch``: to
    the next worker, or to the one that would be done first.
    """
    timeline = Timeline(num_workers)
    pool = Pool(num_workers, workers_per_switch=workers_per_switch, switch_share=switch_share)
    fused = StageTime(0.0, backward[0].forward + backward[0].backward, 0.0, backward[0].upload)
    slots = [(f"F{i}", stage.forward, 0.0, stage.upload) for i, stage in enumerate(forward)]
    for i, stage in enumerate([fused, *backward[1:]]):
        slots.append((f"B{i}", stage.backward, stage.recompute, stage.upload))
    for turn in range(rounds):
        arrivals = np.zeros((num_microbatches, 1))
        for position, (name, seconds, recompute, upload) in enumerate(slots):

            def work_of(worker: int, seconds: float = seconds, early: float = recompute, up: float = upload):
                speed = 1.0 if speeds is None else speeds[worker]
                return SlotWork(seconds / speed, early / speed, up)

            if dispatch == "round_robin":
                worker = (turn * len(slots) + position) % num_workers
            else:
                trials = [copy.deepcopy(pool).slot(w, arrivals, work_of(w)) for w in range(num_workers)]
                worker = min(range(num_workers), key=lambda w: trials[w].computed[-1, 0])
            work = work_of(worker)
            times = pool.slot(worker, arrivals, work)
            timeline.add(worker, name, range(num_microbatches), work.compute + work.recompute, times)
            arrivals = times.delivered + hop
    return timeline


class _Job(NamedTuple):
    kind: Literal["F", "B"]
    stage: int
    microbatches: tuple[int, ...]


def _alternating(worker: int, num_stages: int, num_workers: int, num_microbatches: int) -> list[_Job]:
    """The order of one worker. Microbatches go through its stages in groups of as many as there are workers."""
    chunks = -(-num_stages // num_workers)
    groups = [
        range(first, min(first + num_workers, num_microbatches))
        for first in range(0, num_microbatches, num_workers)
    ]
    order = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    if chunks == 1:
        warm = num_workers - worker - 1
    else:
        warm = 2 * (num_workers - worker - 1) + (chunks - 1) * num_workers
    forward = [_Job("F", chunk * num_workers + worker, (m,)) for chunk, m in order]
    backward = [_Job("B", (chunks - 1 - chunk) * num_workers + worker, (m,)) for chunk, m in order]
    warm = min(warm, len(forward))
    jobs = forward[:warm]
    for i in range(len(order)):
        jobs += [*forward[warm + i : warm + i + 1], backward[i]]
    return [job for job in jobs if job.stage < num_stages]


def _play_bound(orders: list[list[_Job]], stages: Sequence[StageTime], hop: float, pool: Pool) -> Timeline:
    """Each worker does its jobs in order, each once its inputs are there. The recompute waits for the gradient."""
    timeline = Timeline(len(orders))
    done: dict[tuple[str, int, int], float] = {}
    waiting = [list(reversed(jobs)) for jobs in orders]
    while any(waiting):
        before = len(timeline.slots)
        for worker, jobs in enumerate(waiting):
            if not jobs:
                continue
            kind, number, microbatches = jobs[-1]
            source = _source(kind, number, len(stages))
            if source is not None and any((*source, m) not in done for m in microbatches):
                continue
            jobs.pop()
            moments = [0.0 if source is None else done[(*source, m)] + hop for m in microbatches]
            stage = stages[number]
            seconds = stage.forward if kind == "F" else stage.recompute + stage.backward
            work = SlotWork(seconds, upload=stage.upload)
            times = pool.slot(worker, np.array(moments)[:, None], work)
            timeline.add(worker, f"{kind}{number}", microbatches, seconds, times)
            ends = zip(microbatches, timeline.slots[-1].ends, strict=True)
            done.update({(kind, number, m): end for m, end in ends})
        assert len(timeline.slots) > before, "the orders of the workers wait for one another"
    return timeline


def _source(kind: str, stage: int, num_stages: int) -> tuple[str, int] | None:
    """Whose output a slot waits for. The last stage's own forward is on the spot, but never before it is done."""
    if kind == "F":
        return None if stage == 0 else ("F", stage - 1)
    return None if stage == num_stages - 1 else ("B", stage + 1)
