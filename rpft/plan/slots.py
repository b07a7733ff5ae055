"""What the slots of plans ask of workers, links and the optimizer: arrays over many plans, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rpft.model.update_order import backward_order
from rpft.plan.plan import Plan
from rpft.plan.pool import SlotWork, slower_beside
from rpft.plan.rates import Rates
from rpft.plan.step_shape import StepShape


class SlotTable:
    """The slots of a round of each plan. Plans agree in all but their stages; arrays are (slot, plan)."""

    def __init__(self, plans: Sequence[Plan], shape: StepShape, rates: Rates) -> None:
        self.num_microbatches = plans[0].num_microbatches
        self.num_slots = np.array([plan.num_slots for plan in plans])
        self.per_step = self.num_slots * shape.rounds
        self.columns = np.arange(len(plans))
        resident = set(plans[0].resident)
        self.uploaded_bytes = np.array(
            [load.weight_bytes - load.frozen_bytes * (i in resident) for i, load in enumerate(shape.loads)]
        )
        self.sent = up_to(self.uploaded_bytes / rates.up)
        """Seconds that the weights of the first 0, 1, 2, ... layers take up."""
        self.sent_down = up_to([load.gradient_bytes / rates.down for load in shape.loads])
        """The same of their gradients down."""
        self._read_stages(plans)
        self._price(plans[0], shape, rates)

    def _read_stages(self, plans: Sequence[Plan]) -> None:
        """In one go for all plans: a search plays many, and one by one this takes as long as playing."""
        counts = self.num_slots
        size, num_forward = (counts.max(), len(plans)), np.array([len(plan.forward) for plan in plans])
        bounds = chain.from_iterable(chain.from_iterable(plan.forward + plan.backward for plan in plans))
        first, last = np.fromiter(bounds, int, 2 * counts.sum()).reshape(-1, 2).T
        columns, slots = _numbered(counts)
        self.first, self.last = np.zeros(size, int), np.full(size, -1)
        self.backward, self.fused = np.zeros(size, bool), np.zeros(size, bool)
        self.first[slots, columns], self.last[slots, columns] = first, last
        self.backward[slots, columns] = slots >= num_forward[columns]
        self.fused[num_forward, self.columns] = True
        # Each partition, with the fused stage, covers all layers: (slot, plan) in order of plan and layer.
        up, down = _numbered(num_forward + 1), _numbered(counts - num_forward)
        self.covers = [(up[1], up[0]), (counts[down[0]] - 1 - down[1], down[0])]

    def _price(self, plan: Plan, shape: StepShape, rates: Rates) -> None:
        loads, last, first = shape.loads, self.last, self.first

        def over(values: Sequence[float] | np.ndarray) -> np.ndarray:
            sums = up_to(values)
            return sums[last + 1] - sums[first]

        # By layer every input of a block is kept, and what its forward keeps; by stage the stage's input alone.
        each = shape.boundary_bytes + plan.keep_bytes_per_token * shape.tokens
        layers = last - first + 1.0 if plan.recompute == "layer" else 1.0
        self.carried = np.where(self.fused, 0.0, layers * each)
        early = over([load.recompute for load in loads]) * self.backward
        spared = over([load.spared for load in loads]) * ~self.fused
        apart = over([load.fused for load in loads]) + early
        backward = over([load.backward for load in loads]) + apart * self.fused - spared
        input_up = shape.boundary_bytes / rates.up
        gradients = over([load.gradient_bytes for load in loads]) * self.backward
        self.moved = over(self.uploaded_bytes) + gradients
        work = SlotWork(
            compute=np.where(self.backward, backward, over([load.forward for load in loads])),
            recompute=early * ~self.fused,
            upload=self.sent[last + 1] - self.sent[first],
            gradients_down=gradients / rates.down,
            kept_up=np.where(self.backward & ~self.fused, self.carried / rates.up + input_up, 0.0),
            kept_down=np.where(self.backward, 0.0, self.carried / rates.down),
            backward=self.backward,
        )
        self.updating = self._update_seconds(shape, rates)
        written, read = self._after_update(shape, rates)
        work = work._replace(written=written, read=read)
        self.asked = np.stack([np.broadcast_to(part, first.shape).astype(float) for part in work], axis=1)
        """(slot, field of SlotWork, plan)."""
        self._least, self._most = int(self.num_slots.min()), int(self.num_slots.max())
        self._in_first = np.arange(self.asked[0].size).reshape(self.asked[0].shape)
        """Where in ``asked`` what slot 0 asks is."""

    def work(self, number: int) -> SlotWork:
        """What slot ``number`` of a run, of each plan, asks of its worker.

        ``written`` and ``read`` count from the beginning of the update that a slot waits for.
        """
        if self._least == self._most or number < self._least:
            return SlotWork(*self.asked[number % self._most])
        return SlotWork(*self.asked.take(number % self.num_slots * self._in_first.size + self._in_first))

    def _after_update(self, shape: StepShape, rates: Rates) -> tuple[np.ndarray, np.ndarray]:
        """How long after an update begins the weights of a slot can be up, and its gradients down."""
        order = update_order(shape)
        over = np.empty(self.updating.shape)
        over[order] = np.cumsum(self.updating[order], axis=0)
        self.update_seconds = over[order[-1]]
        written = over.copy()
        for layer, load in enumerate(shape.loads):
            for lender in load.lenders:
                np.maximum(written[layer], written[lender], out=written[layer])
        sent = self.sent[:, None]
        if rates.copies_beside < 1 and not shape.delayed:  # of late updates they come much later
            own = slower_beside(np.diff(sent, axis=0), written[-1] - written, rates.copies_beside)
            sent = np.concatenate((np.zeros((1, written.shape[1])), np.cumsum(own, axis=0)))
        sent = np.broadcast_to(sent, (len(sent), written.shape[1]))
        up, down = np.full((2, *self.first.shape), -np.inf)
        for slots, columns in self.covers:
            first, last = self.first[slots, columns], self.last[slots, columns]
            latest = self._latest(first, columns, written - sent[:-1])
            up[slots, columns] = latest + sent[last + 1, columns]
        if shape.delayed:  # it may not have read the gradients before, the last layer's first
            has_gradient = np.array([[load.gradient_bytes > 0] for load in shape.loads])
            slots, columns = self.covers[1]
            first = self.first[slots, columns]
            read = np.where(has_gradient, over + self.sent_down[1:, None], -np.inf)
            down[slots, columns] = self._latest(first, columns, read) - self.sent_down[first]
        return up, down

    def _latest(self, first: np.ndarray, columns: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """The latest of the ``moments`` of the layers of each stage of a cover; ``first``: of its layers."""
        return np.maximum.reduceat(np.ascontiguousarray(moments.T).ravel(), first + columns * len(moments))

    def _update_seconds(self, shape: StepShape, rates: Rates) -> np.ndarray:
        trained = np.array([[load.num_trained] for load in shape.loads], float)
        sizes = np.repeat(trained, len(self.columns), axis=1)
        copies = self._copied_beside(trained, shape) / rates.memory if rates.memory < np.inf else 0.0
        return np.maximum(sizes / rates.update + copies, sizes / rates.moments)  # the disk works beside it

    def _copied_beside(self, trained: np.ndarray, shape: StepShape) -> np.ndarray:
        """Bytes of copies beside the update of each layer, (layer, plan).

        An exact update has beside it what the next forward copies for the same layer, since neither is ahead of
        the other for long where that matters; a late one all copies of a step, which it is spread over.
        """
        if not shape.delayed:
            return self._copied_forward()
        played = np.arange(len(self.first))[:, None] < self.num_slots
        each = self.carried + 2 * shape.boundary_bytes
        copied = self.moved + self.num_microbatches * each
        share = trained / max(trained.sum(), 1.0)
        return share * (shape.rounds * np.where(played, copied, 0.0).sum(axis=0))

    def _copied_forward(self) -> np.ndarray:
        """For each layer, (layer, plan), what a forward copies from and to the host."""
        slots, columns = self.covers[0]
        stages = self.last[slots, columns] - self.first[slots, columns] + 1
        carried = self.carried[slots, columns] * self.num_microbatches / stages
        copied = np.repeat(carried, stages).reshape(len(self.columns), -1).T
        below = np.arange(len(self.sent) - 1)[:, None] < np.max(np.where(self.fused, self.first, 0), axis=0)
        return copied + np.where(below, self.uploaded_bytes[:, None], 0.0)


def update_order(shape: StepShape) -> list[int]:
    """The order in which the optimizer updates layers."""
    if shape.delayed:
        return backward_order([load.lenders for load in shape.loads])
    return list(range(len(shape.loads)))


def up_to(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... of ``values``."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(plan, number in it) of so many things in each plan, one after the other."""
    columns = np.repeat(np.arange(len(counts)), counts)
    return columns, np.arange(len(columns)) - (np.cumsum(counts) - counts)[columns]
