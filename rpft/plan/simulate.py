"""How long a step takes under a plan: slots with their transfers and the optimizer, played through in order.

A slot meets nothing but earlier slots of the order of dispatch and earlier updates, so that one pass over the
slots gives every time. Times are arrays: a search plays hundreds of plans side by side, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rpft.model.layout import backward_order
from rpft.plan.plan import Plan
from rpft.plan.pool import Pool, SlotTimes, SlotWork, slower_beside
from rpft.plan.rates import Rates
from rpft.plan.step_shape import StepShape

_STEPS_WARM = 2
_TURNS_WARM = 3
"""Steps, and turns of all workers, after which what starting up changes is over where updates are late."""

_TURNS_TIMED = 8

_FEW_AT_ONCE, _MOST_AT_ONCE = 64, 1024
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
        self.num_microbatches = plans[0].num_microbatches
        self.num_slots = np.array([plan.num_slots for plan in plans])
        self.per_step = self.num_slots * shape.rounds
        resident = set(plans[0].resident)
        self.uploaded_bytes = np.array(
            [load.weight_bytes - load.frozen_bytes * (i in resident) for i, load in enumerate(shape.loads)]
        )
        self.sent = _up_to(self.uploaded_bytes / rates.up)
        self.has_gradient = np.array([[load.gradient_bytes > 0] for load in shape.loads])
        self.sent_down = _up_to([load.gradient_bytes / rates.down for load in shape.loads])
        self.update_sizes = np.array([[load.num_trained] for load in shape.loads], float)
        self.order = list(range(len(shape.loads)))
        if shape.delayed:
            self.order = backward_order([load.lenders for load in shape.loads])
        self._read_stages(plans)
        self._price(plans)
        self.updating = self._update_seconds()
        """Seconds of each layer's update, (layer, column)."""
        self.dispatch = [plan.dispatch for plan in plans] if any(plan.dispatch for plan in plans) else None
        self.even_shares = self.dispatch is None and not shape.mixed
        self.optimizer = np.zeros(len(plans))
        self.late = np.zeros((len(shape.loads), len(plans)))
        """When the weights are written that the next step but one reads, (layer, column): of late updates."""

    def _read_stages(self, plans: Sequence[Plan]) -> None:
        size = (self.num_slots.max(), len(plans))
        self.first, self.last = np.zeros(size, int), np.full(size, -1)
        self.backward, self.fused = np.zeros(size, bool), np.zeros(size, bool)
        slots = np.arange(size[0])
        forward_slots, backward_slots = [], []
        self.num_forward = np.array([len(plan.forward) for plan in plans])
        for column, plan in enumerate(plans):
            stages, number = np.array(plan.forward + plan.backward), len(plan.forward)
            self.first[: len(stages), column], self.last[: len(stages), column] = stages.T
            self.backward[number : len(stages), column] = True
            self.fused[number, column] = True
            forward_slots.append(slots[: number + 1])
            backward_slots.append(slots[number : len(stages)][::-1])
        # Both partitions, each with the fused stage, cover all layers in ascending order.
        self.covers = [self._cover(forward_slots), self._cover(backward_slots)]

    def _cover(self, slots: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(slot, column) of each stage of one partition of each plan, in order of column and layer."""
        columns = np.repeat(np.arange(len(slots)), [len(some) for some in slots])
        return np.concatenate(slots), columns

    def _price(self, plans: Sequence[Plan]) -> None:
        plan, shape, rates = plans[0], self.shape, self.rates
        loads, last, first = shape.loads, self.last, self.first

        def over(values: Sequence[float] | np.ndarray) -> np.ndarray:
            up_to = _up_to(values)
            return up_to[last + 1] - up_to[first]

        # By layer every input of a block is kept, and what its forward keeps; by stage the stage's input alone.
        each = shape.boundary_bytes + plan.keep_bytes_per_token * shape.tokens
        layers = last - first + 1.0 if plan.recompute == "layer" else 1.0
        self.carried = np.where(self.fused, 0.0, layers * each)
        early = over([load.recompute for load in loads]) * self.backward
        spared = over([load.spared for load in loads]) * ~self.fused
        backward = over([load.backward for load in loads]) + early * self.fused - spared
        input_up = shape.boundary_bytes / rates.up
        gradients = over([load.gradient_bytes for load in loads]) * self.backward
        self.moved = over(self.uploaded_bytes) + gradients
        work = SlotWork(
            compute=np.where(self.backward, backward, over([load.forward for load in loads])),
            recompute=early * ~self.fused,
            upload=self.sent[last + 1] - self.sent[first],
            written=np.zeros(first.shape),
            gradients_down=gradients / rates.down,
            read=np.zeros(first.shape),
            kept_up=np.where(self.backward & ~self.fused, self.carried / rates.up + input_up, 0.0),
            kept_down=np.where(self.backward, 0.0, self.carried / rates.down),
            backward=self.backward,
        )
        self.work = np.stack([np.asarray(part, float) for part in work])
        """(field of SlotWork, slot of a round, column)."""

    def step_seconds(self) -> np.ndarray:
        """Seconds a step in the long run."""
        count, num_workers = len(self.num_slots), self.shape.num_workers
        if not self.shape.delayed:
            # An exact update waits for the whole step, so that every step starts as if nothing had been before it.
            return self.play(1)[0]
        # After so many steps the same workers have the same slots again; a few turns of all workers will do too.
        again = num_workers // np.gcd(num_workers, self.per_step)
        steps = np.minimum(again, np.ceil(_TURNS_TIMED * num_workers / self.per_step).astype(int))
        steps += steps % 2  # a step that updates hold up starts with the one before the last: two take turns
        begun = steps_warm(self.per_step, num_workers)
        if not self.even_shares:  # some workers run ahead, until updates hold them
            begun, steps = begun + _TURNS_TIMED, np.full(count, _TURNS_TIMED)
        columns = np.arange(count)
        times = self.play(int((begun + steps).max()))
        return (times[begun + steps - 1, columns] - times[begun - 1, columns]) / steps

    def play(self, steps: int, choose: Choose | None = None) -> np.ndarray:
        """When each of the first ``steps`` steps is over, (steps, columns); exact ones begin with an update at 0.

        For exact updates that is when its last gradient lands; for late ones, where steps overlap, the mean of the
        times to which the workers have work then, if they have even shares. ``choose``: says which worker gets a
        slot, in the place of the plans.
        """
        shape, rates, count = self.shape, self.rates, len(self.num_slots)
        pool = Pool(
            shape.num_workers,
            count,
            input_up=shape.boundary_bytes / rates.up,
            output_down=shape.boundary_bytes / rates.down,
            slot_seconds=shape.slot_seconds,
            workers_per_switch=rates.workers_per_switch,
            switch_share=rates.switch_share,
            copies_beside=rates.copies_beside,
        )
        if not shape.delayed:
            pool.update = self._update(np.ones(count, bool), np.zeros(count))
        columns = np.arange(count)
        alike = bool(np.all(self.num_slots == self.num_slots[0]))
        step_ends = set((self.per_step[:, None] * np.arange(1, steps + 1)).ravel().tolist())
        times, latest = np.zeros((steps, count)), np.zeros(count)
        delivered = np.zeros((self.num_microbatches, count))
        for number in range(steps * int(self.per_step.max())):
            slot = number % self.num_slots
            work = SlotWork(*(self.work[:, slot[0]] if alike else self.work[:, slot, columns]))
            arrivals = np.where(slot == 0, 0.0, delivered + shape.hop)  # a new round waits for no hidden state

            def play_on(pool: Pool, worker: int | np.ndarray, arrivals=arrivals, work=work) -> SlotTimes:
                return pool.slot(worker, arrivals, self._on(worker, work))

            worker = self._worker_of(number) if choose is None else choose(pool, play_on)
            played = play_on(pool, worker)
            if self.watcher is not None:
                self.watcher.slot(number, worker, self._on(worker, work), played)
            delivered = played.delivered
            latest = np.maximum(latest, np.where(work.backward, played.landed, 0.0))
            if number + 1 in step_ends:
                step, over = np.divmod(number + 1, self.per_step)
                done = (over == 0) & (step <= steps)
                moments = pool.compute.mean(axis=0) if shape.delayed and self.even_shares else latest
                times[step[done] - 1, columns[done]] = moments[done]
                pool.update = np.where(done, self._update(done, latest), pool.update)
        return times

    def _worker_of(self, number: int) -> int | np.ndarray:
        """The worker of a slot, or where plans say it for themselves one for each."""
        in_turn = number % self.shape.num_workers
        if self.dispatch is None:
            return in_turn
        places = (number % self.per_step).tolist()
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

    def _update(self, done: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The optimizer's work after a step, for the next or the one after, of the plans that ``done`` marks.

        When it begins and ends, (2, column).
        """
        begun = np.maximum(self.optimizer, end)
        written = np.empty(self.updating.shape)
        written[self.order] = begun + np.cumsum(self.updating[self.order], axis=0)
        over = written[self.order[-1]]
        if self.watcher is not None:
            self.watcher.update(begun, over)
        self.optimizer = np.where(done, over, self.optimizer)
        if self.shape.delayed:
            self._set_read(done, written)
            written, self.late = self.late, np.where(done, written, self.late)
        self._set_written(done, written)
        return np.stack([begun, over])

    def _update_seconds(self) -> np.ndarray:
        rates, sizes = self.rates, np.repeat(self.update_sizes, len(self.num_slots), axis=1)
        copies = self._copied_beside() / rates.memory if rates.memory < np.inf else 0.0
        return np.maximum(sizes / rates.update + copies, sizes / rates.moments)  # the disk works beside it

    def _copied_beside(self) -> np.ndarray:
        """Bytes of copies beside the update of each layer, (layer, column).

        An exact update has beside it what the next forward copies for the same layer, since neither is ahead of
        the other for long where that matters; a late one all copies of a step, which it is spread over.
        """
        if not self.shape.delayed:
            return self._copied_forward()
        played = np.arange(len(self.first))[:, None] < self.num_slots
        each = self.carried + 2 * self.shape.boundary_bytes
        copied = self.moved + self.num_microbatches * each
        share = self.update_sizes / max(self.update_sizes.sum(), 1.0)
        return share * (self.shape.rounds * np.where(played, copied, 0.0).sum(axis=0))

    def _copied_forward(self) -> np.ndarray:
        """For each layer, (layer, column), what a forward copies from and to the host."""
        slots, columns = self.covers[0]
        stages = self.last[slots, columns] - self.first[slots, columns] + 1
        carried = self.carried[slots, columns] * self.num_microbatches / stages
        copied = np.repeat(carried, stages).reshape(len(self.num_slots), -1).T
        below = np.arange(len(self.sent) - 1)[:, None] < np.max(np.where(self.fused, self.first, 0), axis=0)
        return copied + np.where(below, self.uploaded_bytes[:, None], 0.0)

    def _set_written(self, done: np.ndarray, written: np.ndarray) -> None:
        """From when the working weights of each layer are new, to when each slot may have them at the earliest."""
        written = written.copy()
        for layer, load in enumerate(self.shape.loads):
            for lender in load.lenders:
                np.maximum(written[layer], written[lender], out=written[layer])
        sent = self.sent[:, None]
        if self.rates.copies_beside < 1 and not self.shape.delayed:  # of late updates they come much later
            own = slower_beside(np.diff(sent, axis=0), written[-1] - written, self.rates.copies_beside)
            sent = np.concatenate((np.zeros((1, written.shape[1])), np.cumsum(own, axis=0)))
        sent = np.broadcast_to(sent, (len(sent), written.shape[1]))
        for cover in self.covers:
            slots, columns, latest = self._latest(cover, done, written - sent[:-1])
            self._set("written", slots, columns, latest + sent[self.last[slots, columns] + 1, columns])

    def _set_read(self, done: np.ndarray, read: np.ndarray) -> None:
        """From when the gradients of each layer may land, to when those of each backward slot can have.

        A late update may not have read the ones before when they come, the last layer's first.
        """
        read = np.where(self.has_gradient, read + self.sent_down[1:, None], 0.0)
        slots, columns, latest = self._latest(self.covers[1], done, read)
        self._set("read", slots, columns, latest - self.sent_down[self.first[slots, columns]])

    def _latest(
        self, cover: tuple[np.ndarray, np.ndarray], done: np.ndarray, moments: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The stages of a cover, (slot, column), each with the latest of the ``moments`` of its layers.

        Only of the plans that ``done`` marks.
        """
        chosen = done[cover[1]]
        slots, columns = (each[chosen] for each in cover)
        starts = self.first[slots, columns] + (np.cumsum(done) - 1)[columns] * len(moments)
        return slots, columns, np.maximum.reduceat(np.ascontiguousarray(moments[:, done].T).ravel(), starts)

    def _set(self, name: str, slots: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Fills a field of ``self.work``."""
        self.work[SlotWork._fields.index(name)][slots, columns] = values


def update_seconds(plan: Plan, shape: StepShape, rates: Rates) -> float:
    """Of the optimizer's work after a step, with what copies beside it take of the memory."""
    return float(Run([plan], shape, rates).updating.sum())


def steps_warm(slots_per_step: np.ndarray, num_workers: int) -> np.ndarray:
    """Steps after which late updates have settled."""
    return _STEPS_WARM + np.ceil(_TURNS_WARM * num_workers / slots_per_step).astype(int)


def slot_works(plan: Plan, shape: StepShape, rates: Rates) -> list[SlotWork]:
    """What each slot of a round asks of its worker."""
    work = Run([plan], shape, rates).work
    return [SlotWork(*map(float, work[:, slot, 0])) for slot in range(plan.num_slots)]


def watched_steps(plan: Plan, shape: StepShape, rates: Rates, steps: int, watcher: Watcher) -> list[float]:
    """Plays the first ``steps`` steps of a run for ``watcher``; when each is over, as `step_seconds` counts."""
    return Run([plan], shape, rates, watcher).play(steps)[:, 0].tolist()


def steps_seconds(plans: Sequence[Plan], shape: StepShape, rates: Rates) -> np.ndarray:
    """Seconds a step in the long run under each of ``plans``, which differ in their stages only."""
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


def step_seconds(plan: Plan, shape: StepShape, rates: Rates) -> float:
    """Seconds a step in the long run."""
    return float(steps_seconds([plan], shape, rates)[0])


def _up_to(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... of ``values``."""
    return np.concatenate(([0.0], np.cumsum(values)))
