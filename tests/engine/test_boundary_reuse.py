"""Memory of hidden states is used again in the order in which it is free, not in that of the program."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from support.engines import plan_of, random_batches, run_engine

from rpft.engine.buffers import BoundaryPool
from rpft.engine.pace import Pace
from rpft.engine.slot import Slot
from rpft.engine.streams import Event
from rpft.engine.worker import Worker
from rpft.plan.schedules import StageTime, round_pipe

LONG_FORWARD = plan_of([(0, 4)], [(5, 5), (4, 4), (3, 3), (2, 2), (0, 1)], 4, "layer")
"""Whose first slot of a step writes for each microbatch what several slots of the step before read for it."""


@pytest.mark.parametrize("seed", range(20))
def test_slots_begin_when_the_schedule_has_them(seed):
    rng = random.Random(seed)
    workers, microbatches, slots, rounds = (rng.randint(1, n) for n in (8, 10, 20, 3))
    backward = rng.randint(1, slots)
    played = round_pipe(
        [StageTime(1.0, 0.0)] * (slots - backward), [StageTime(0.0, 1.0)] * backward, workers, microbatches, rounds
    )
    pace = Pace(workers)
    assert len(played.slots) == slots * rounds
    for number, slot in enumerate(played.slots):
        assert pace.begin(slot.worker, microbatches, follows=number % slots > 0) == slot.ends[0] - 1


def test_at_rest_all_workers_are_free_together():
    pace = Pace(3)
    pace.begin(1, 5, follows=False)
    pace.rest()
    assert pace.begin(0, 1, follows=False) == 5


def test_memory_that_is_free_first_is_used_first():
    pool = BoundaryPool(lambda n: torch.zeros(n, dtype=torch.uint8), 4, torch.float32)
    made = [pool.acquire((1, 1, 1), num_readers=1) for _ in range(3)]
    for boundary, at in zip(made, (7, 5, 6), strict=True):
        pool.read(boundary, at)
    again = [pool.acquire((1, 1, 1), num_readers=1).memory.data_ptr() for _ in range(3)]
    assert again == [made[number].memory.data_ptr() for number in (1, 2, 0)]


@dataclass
class Watched:
    """When events of readings are to come, by the pace, and how often a writer comes before one."""

    read_at: dict[Event, int] = field(default_factory=dict)
    too_early: int = 0
    written: int = 0

    def see(self, slot: Slot, begins: int) -> None:
        for m, task in enumerate(slot.tasks):
            readings = [*task.inputs.values(), *([task.grad_input] if task.grad_input else [])]
            self.read_at.update({reading.done: begins + m for reading in readings})
        for m, task in enumerate(slot.tasks):
            for boundary in [*task.outputs.values(), *([task.grad_output] if task.grad_output else [])]:
                self.written += 1
                self.too_early += any(self.read_at[guard] > begins + m for guard in boundary.writable_after)


@pytest.fixture
def watched(monkeypatch) -> Watched:
    seen, begins = Watched(), []
    begin, enqueue = Pace.begin, Worker.enqueue

    def noted(pace, worker, num_microbatches, follows):
        begins.append(begin(pace, worker, num_microbatches, follows))
        return begins[-1]

    def seen_first(worker, slot):
        seen.see(slot, begins[slot.number])
        enqueue(worker, slot)

    monkeypatch.setattr(Pace, "begin", noted)
    monkeypatch.setattr(Worker, "enqueue", seen_first)
    return seen


@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
def test_no_slot_waits_for_memory_that_another_will_read_later(update_lag, watched, checkpoint):
    run_engine(
        checkpoint("llama"),
        LONG_FORWARD,
        4,
        steps=5,
        update_lag=update_lag,
        batches_of=lambda step: random_batches(4, step, rows=1),
    )
    assert watched.written > 100
    assert watched.too_early == 0
