"""Workers and their streams, on paper: when each stream of each worker is free, and how a slot takes them up.

The one event model behind all schedules. Every time is an array with an entry for each of many plans, which are
played side by side: a search for a plan plays thousands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


def serve(arrivals: np.ndarray, free: np.ndarray, before: Any, seconds: Any, numbers: np.ndarray) -> np.ndarray:
    """When a server that is free at ``free`` is done with each of a row of jobs, taken in order.

    A job starts ``before`` seconds after the one before it is done, and once it has arrived:
    done[m] = max(done[m - 1] + before, arrivals[m]) + seconds. Rows are jobs, columns are plans. ``numbers``: m of
    each row, (rows, 1); the first is 0, others may be left out.

    Jobs must come in ever longer, or equal, intervals. Then each waits, if it does, since the first job, or for
    nothing but its own arrival, and intervals in which they are done get no shorter either.
    """
    done = arrivals + seconds
    first = np.maximum(done[0], free + before + seconds)
    return np.maximum(done, first + numbers * (before + seconds), out=done)


def slower_beside(seconds: Any, left: Any, share: float) -> Any:
    """``seconds`` of copies, longer where an update goes on for ``left`` seconds beside them and leaves them
    ``share`` of their rate."""
    return seconds + np.minimum(seconds * (1 / share - 1), np.maximum(left, 0.0) * (1 - share))


class SlotWork(NamedTuple):
    """Seconds that a slot takes, numbers or arrays with one for each plan."""

    compute: Any
    """Of a microbatch, once its input is there."""
    recompute: Any = 0.0
    """Of a microbatch, before that: what needs no input from the slot before."""
    upload: Any = 0.0
    written: Any = 0.0
    """When the upload can be over at the earliest, because of the update before it: a time."""
    gradients_down: Any = 0.0
    read: Any = 0.0
    """When the gradients can be down at the earliest, because the update before must have read what lay there: a
    time."""
    kept_up: Any = 0.0
    """Of a microbatch: hidden states that come up while it is computed."""
    kept_down: Any = 0.0
    """Of a microbatch: what goes down while it is computed."""
    backward: Any = 0.0
    """1 for a slot that has gradients, else 0."""


class SlotTimes(NamedTuple):
    """When a slot did what, for each plan; inputs, computed and delivered have a row for each microbatch."""

    uploaded: np.ndarray
    inputs: np.ndarray
    """When the hidden state of each microbatch was up."""
    computed: np.ndarray
    delivered: np.ndarray
    landed: np.ndarray
    """The last gradient of a backward slot."""


class Pool:
    """When each stream of each worker is free. Arrays are (worker, plan)."""

    def __init__(
        self,
        num_workers: int,
        num_plans: int = 1,
        *,
        input_up: float = 0.0,
        output_down: float = 0.0,
        slot_seconds: float = 0.0,
        workers_per_switch: int = 1,
        switch_share: float = 0.0,
        copies_beside: float = 1.0,
        microbatches: np.ndarray | None = None,
    ) -> None:
        """``input_up``, ``output_down``: seconds that the hidden state of a microbatch takes on the link.

        ``switch_share``: the part of a transfer's time for which the workers of the same switch cannot start one.
        ``copies_beside``: the share of its rate that an upload of weights keeps during an update.
        ``microbatches``: the numbers of those that are played, in order; None: all that arrive. Those of a slot
        all take the same time, so that the first and the last alone say when a slot is over (``serve``).
        """
        streams = np.zeros((5, num_workers, num_plans))
        self.compute, self.weights_up, self.inputs_up, self.outputs_down, self.gradients_down = streams
        self.ends = np.zeros((2, num_workers, num_plans))
        """When the last two slots let go of their weight buffers."""
        self.input_up, self.output_down, self.slot_seconds = input_up, output_down, slot_seconds
        self.workers_per_switch, self.switch_share = workers_per_switch, switch_share
        self.switch_up, self.switch_down = np.zeros((2, -(-num_workers // workers_per_switch), num_plans))
        self.copies_beside = copies_beside
        self.update = np.zeros((2, num_plans))
        """When the update that is under way, or was last, begins and ends."""
        self.plans = np.arange(num_plans)
        self.microbatches = None if microbatches is None else microbatches[:, None]

    def slot(self, worker: int | np.ndarray, arrivals: np.ndarray, work: SlotWork) -> SlotTimes:
        """Plays a slot whose microbatches arrive at ``arrivals``, (microbatches, plans), on one worker for all
        plans, or on one for each.
        """
        w = worker if isinstance(worker, int) else (worker, self.plans)
        numbers = np.arange(len(arrivals))[:, None] if self.microbatches is None else self.microbatches
        start = np.maximum(self.weights_up[w], self.ends[0][w])
        upload, (begun, over) = work.upload, self.update
        if self.copies_beside < 1 and (start < over).any():
            upload = slower_beside(upload, (over - start) * (start >= begun), self.copies_beside)
        start = self._through(self.switch_up, worker, start, upload)
        uploaded = self.weights_up[w] = np.maximum(start + upload, work.written)
        inputs = serve(arrivals, self.inputs_up[w], 0.0, self.input_up, numbers) if self.input_up else arrivals
        # A hidden state a layer is carried while the neighbouring layers compute: what is slower sets the pace, on
        # the way down since few results may wait (sizes.RESULTS_IN_FLIGHT).
        pace = np.maximum(work.compute, np.maximum(work.kept_up, work.kept_down))
        computed = serve(inputs, np.maximum(self.compute[w], uploaded), work.recompute, pace, numbers)
        self.inputs_up[w] = np.maximum(inputs[-1], computed[-1] - pace + work.kept_up)
        delivered = computed
        if self.output_down:
            delivered = serve(computed, self.outputs_down[w], work.kept_down, self.output_down, numbers)
            self.outputs_down[w] = delivered[-1]
        end = computed[-1] + self.slot_seconds
        self.ends[0][w], self.ends[1][w] = self.ends[1][w], end
        rounded = np.maximum(end, self.gradients_down[w])  # rounding waits for the buffer
        landed = self._through(self.switch_down, worker, rounded, work.gradients_down) + work.gradients_down
        landed = np.maximum(landed, work.read)
        self.compute[w] = np.where(work.backward, rounded, end)
        self.gradients_down[w] = landed  # of a forward slot when it ends, which no later slot does before
        return SlotTimes(uploaded, inputs, computed, delivered, landed)

    def _through(
        self, switch: np.ndarray, worker: int | np.ndarray, start: np.ndarray, seconds: Any
    ) -> np.ndarray:
        """When a transfer of ``seconds`` that ``worker`` could start at ``start`` finds its switch free."""
        if not self.switch_share:
            return start
        its = worker // self.workers_per_switch
        number = its if isinstance(its, int) else (its, self.plans)
        start = np.where(seconds, np.maximum(start, switch[number]), start)
        switch[number] = np.maximum(switch[number], start + seconds * self.switch_share)
        return start
