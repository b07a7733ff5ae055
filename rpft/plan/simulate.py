"""How long a step takes under a plan: slots with their transfers and the optimizer, played through in order.

A slot meets nothing but earlier slots of the order of dispatch and earlier updates, so that one pass over the
slots gives every time. Times are arrays: a search plays hundreds of plans side by side, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from rpft.plan.plan import Plan
from rpft.plan.pool import Pool, SlotTimes, SlotWork
from rpft.plan.rates import Rates
from rpft.plan.slots import SlotTable
from rpft.plan.step_shape import StepShape

_STEPS_WARM = 2
_TURNS_WARM = 3
"""Steps, and turns of all workers, after which what starting up changes is over where updates are late."""

_TURNS_TIMED = 8

_FEW_ROUNDS = 8
"""Rounds of a step, at least, that are played before others are taken to be like them."""

_FEW_AT_ONCE, _MOST_AT_ONCE = 320, 1024
"""Plans played side by side: a few take no longer than one, and of so many the times stay in the cache."""


PlayOn = Callable[[Pool, "int | np.ndarray"], SlotTimes]
Choose = Callable[[Pool, PlayOn], int]
"""Takes the pool and what plays the next slot on a worker of it; gives the worker."""


class Watcher(Protocol):
    """Who is told of everything as it is played."""

    def slot(self, number: int, worker: int | np.ndarray, work: SlotWork, times: SlotTimes) -> None:
        """``number``: of the slot in the whole run, from 0."""
        ...

    def update(self, begun: np.ndarray, written: np.ndarray) -> None:
        """When the optimizer's work after a step began and ended."""
        ...


class Run:
    """Steps of several plans, side by side: a column for each. They agree in all but their stages."""

    def __init__(
        self, plans: Sequence[Plan], shape: StepShape, rates: Rates, watcher: Watcher | None = None
    ) -> None:
        self.shape, self.rates, self.watcher = shape, rates, watcher
        self.slots = SlotTable(plans, shape, rates)
        self.dispatch = [plan.dispatch for plan in plans] if any(plan.dispatch for plan in plans) else None
        self.even_shares = self.dispatch is None and not shape.mixed
        # Of a slot's microbatches the first and the last say all (plan/pool.py); a watcher is told of every one.
        count = plans[0].num_microbatches
        self.microbatches = np.arange(count) if watcher is not None else np.unique([0, count - 1])

    def step_seconds(self) -> np.ndarray:
        """Seconds a step in the long run."""
        per_step, num_workers = self.slots.per_step, self.shape.num_workers
        if not self.shape.delayed:
            # An exact update waits for the whole step, so that every step starts as if nothing had been before it.
            return self.play(1)[0]
        # After so many steps the same workers have the same slots again; a few turns of all workers will do too.
        again = num_workers // np.gcd(num_workers, per_step)
        steps = np.minimum(again, np.ceil(_TURNS_TIMED * num_workers / per_step).astype(int))
        steps += steps % 2  # a step that updates hold up starts with the one before the last: two take turns
        begun = steps_warm(per_step, num_workers)
        if not self.even_shares:  # some workers run ahead, until updates hold them
            begun, steps = begun + _TURNS_TIMED, np.full(len(per_step), _TURNS_TIMED)
        columns = np.arange(len(per_step))
        times = self.play(int((begun + steps).max()))
        return (times[begun + steps - 1, columns] - times[begun - 1, columns]) / steps

    def play(self, steps: int, choose: Choose | None = None) -> np.ndarray:
        """When each of the first ``steps`` steps is over, (steps, columns); exact ones begin with an update at 0.

        For exact updates that is when its last gradient lands; for late ones, where steps overlap, the mean of the
        times to which the workers have work then, if they have even shares. ``choose``: says which worker gets a
        slot, in the place of the plans.
        """
        shape, rates, slots, watcher = self.shape, self.rates, self.slots, self.watcher
        columns = np.arange(len(slots.num_slots))
        pool = Pool(
            shape.num_workers,
            len(columns),
            input_up=shape.boundary_bytes / rates.up,
            output_down=shape.boundary_bytes / rates.down,
            slot_seconds=shape.slot_seconds,
            workers_per_switch=rates.workers_per_switch,
            switch_share=rates.switch_share,
            copies_beside=rates.copies_beside,
            microbatches=self.microbatches,
        )
        optimizer = _Optimizer(slots.update_seconds, shape.delayed)
        if not shape.delayed:
            pool.update = optimizer.begin(columns >= 0, np.zeros(len(columns)), watcher)
        round_starts = set((slots.num_slots[:, None] * np.arange(steps * shape.rounds)).ravel().tolist())
        step_ends = set((slots.per_step[:, None] * np.arange(1, steps + 1)).ravel().tolist())
        times, latest = np.zeros((steps, len(columns))), np.zeros(len(columns))
        delivered = np.zeros((len(self.microbatches), len(columns)))
        for number in range(steps * int(slots.per_step.max())):
            work = optimizer.waited_for(slots.work(number))
            arrivals = delivered + shape.hop if shape.hop else delivered
            if number in round_starts:  # a new round waits for no hidden state
                arrivals = np.where(number % slots.num_slots == 0, 0.0, arrivals)
            worker = self._worker_of(number)
            if choose is not None:
                worker = choose(pool, self._playing(arrivals, work))
            own = self._on(worker, work)
            played = pool.slot(worker, arrivals, own)
            if watcher is not None:
                watcher.slot(number, worker, own, played)
            delivered = played.delivered
            latest = np.maximum(latest, played.landed)
            if number + 1 in step_ends:
                step, over = np.divmod(number + 1, slots.per_step)
                done = (over == 0) & (step <= steps)
                moments = (
                    pool.compute.sum(axis=0) / shape.num_workers if shape.delayed and self.even_shares else latest
                )
                times[step[done] - 1, columns[done]] = moments[done]
                pool.update = np.where(done, optimizer.begin(done, latest, watcher), pool.update)
        return times

    def _playing(self, arrivals: np.ndarray, work: SlotWork) -> PlayOn:
        """What plays a slot on a worker."""
        return lambda pool, worker: pool.slot(worker, arrivals, self._on(worker, work))

    def _worker_of(self, number: int) -> int | np.ndarray:
        """The worker of a slot, or where plans say it for themselves one for each."""
        in_turn = number % self.shape.num_workers
        if self.dispatch is None:
            return in_turn
        places = (number % self.slots.per_step).tolist()
        given = zip(self.dispatch, places, strict=True)
        return np.array(
            [some[place % len(some)] % self.shape.num_workers if some else in_turn for some, place in given]
        )

    def _on(self, worker: int | np.ndarray, work: SlotWork) -> SlotWork:
        """``work`` at the speed of ``worker``."""
        if self.shape.speeds is None:
            return work
        speed = np.asarray(self.shape.speeds)[worker]
        return work._replace(compute=work.compute / speed, recompute=work.recompute / speed)


class _Optimizer:
    """The updates of each plan that its slots wait for."""

    def __init__(self, seconds: np.ndarray, delayed: bool) -> None:
        self.seconds, self.delayed = seconds, delayed
        self.free = np.zeros(len(seconds))
        self.weights_of, self.gradients_of = np.full((2, len(seconds)), -np.inf)
        """When the updates begin that write the weights which slots read, and that read the gradients before."""

    def begin(self, done: np.ndarray, end: np.ndarray, watcher: Watcher | None) -> np.ndarray:
        """The work after a step that was over at ``end``, of the plans that ``done`` marks.

        When it begins and ends, (2, column). Late updates are for the step after the next.
        """
        begun = np.maximum(self.free, end)
        over = begun + self.seconds
        if watcher is not None:
            watcher.update(begun, over)
        self.free = np.where(done, over, self.free)
        self.weights_of = np.where(done, self.gradients_of if self.delayed else begun, self.weights_of)
        if self.delayed:
            self.gradients_of = np.where(done, begun, self.gradients_of)
        return np.stack([begun, over])

    def waited_for(self, work: SlotWork) -> SlotWork:
        """``work`` with the times at which weights can be up and gradients down."""
        return work._replace(written=self.weights_of + work.written, read=self.gradients_of + work.read)


def update_seconds(plan: Plan, shape: StepShape, rates: Rates) -> float:
    """Of the optimizer's work after a step, with what copies beside it take of the memory."""
    return float(SlotTable([plan], shape, rates).update_seconds[0])


def steps_warm(slots_per_step: np.ndarray, num_workers: int) -> np.ndarray:
    """Steps after which late updates have settled."""
    return _STEPS_WARM + np.ceil(_TURNS_WARM * num_workers / slots_per_step).astype(int)


def slot_works(plan: Plan, shape: StepShape, rates: Rates) -> list[SlotWork]:
    """What each slot of a round asks of its worker."""
    slots = SlotTable([plan], shape, rates)
    return [SlotWork(*(float(part[0]) for part in slots.work(slot))) for slot in range(plan.num_slots)]


def watched_steps(plan: Plan, shape: StepShape, rates: Rates, steps: int, watcher: Watcher) -> list[float]:
    """Plays the first ``steps`` steps of a run for ``watcher``; when each is over, as `step_seconds` counts."""
    return Run([plan], shape, rates, watcher).play(steps)[:, 0].tolist()


def steps_seconds(plans: Sequence[Plan], shape: StepShape, rates: Rates) -> np.ndarray:
    """Seconds a step in the long run under each of ``plans``, which differ in their stages only."""
    counted, repeated = rounds_played(shape)
    if repeated:
        less, more = (steps_seconds(plans, replace(shape, rounds=rounds), rates) for rounds in counted)
        return more + repeated * (more - less)
    result = np.empty(len(plans))
    order = sorted(range(len(plans)), key=lambda i: plans[i].num_slots)
    start = 0
    while start < len(order):
        most = 1.25 * plans[order[start]].num_slots  # plans with fewer slots idle beside those with more
        group = order[start : start + _FEW_AT_ONCE]
        group += [i for i in order[start + _FEW_AT_ONCE : start + _MOST_AT_ONCE] if plans[i].num_slots <= most]
        result[group] = Run([plans[i] for i in group], shape, rates).step_seconds()
        start += len(group)
    return result


def rounds_played(shape: StepShape) -> tuple[tuple[int, ...], int]:
    """The rounds of each step that is played to find out how long one takes; and how often the second of two has
    to be longer than the first by as much as it is.

    Of many rounds those in the middle take as long as one another: as long as so many before them that the same
    workers have the same slots again, whatever number of slots a round has.
    """
    again = shape.num_workers * -(-_FEW_ROUNDS // shape.num_workers)
    times, rest = divmod(shape.rounds, again)
    few = 1 if shape.delayed else 2  # late steps are played several in a row
    if times <= few + 2:
        return (shape.rounds,), 0
    return (few * again + rest, (few + 1) * again + rest), times - few - 1


def step_seconds(plan: Plan, shape: StepShape, rates: Rates) -> float:
    """Seconds a step in the long run."""
    return float(steps_seconds([plan], shape, rates)[0])
