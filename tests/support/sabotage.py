"""Leaves out one wait of the protocol, and holds back what it was for until the harm is done.

A wait is known by the stream that waits, the label of the event, and its number among such waits of the run.
Nothing runs before the whole run is queued, so that a number means the same wait every time; then the work that
the wait was for is held back until the work behind the wait has run. So a breach bites whatever the machine does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rpft.engine.buffers import Ring
from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import Failure
from rpft.engine.slot import Slot
from rpft.engine.streams import Delays, Event, Stream

_LONGEST_SECONDS = 30.0


class Sabotage:
    """Plan of one breach. ``leave_out=False`` keeps the wait and only holds the work back, for ``patience``."""

    def __init__(self, stream: str, label: str, number: int = 0, tasks: int = 1, leave_out: bool = True) -> None:
        """``tasks``: how many tasks of the stream, or waits of the optimizer, follow until the harm is done."""
        self.stream, self.label, self.number, self.tasks, self.leave_out = stream, label, number, tasks, leave_out
        self.patience_seconds = _LONGEST_SECONDS if leave_out else 0.1
        self.labels: dict[Event, str] = {}
        self.producers: dict[Event, Work] = {}
        self.chosen: Event | None = None
        self.harmed = threading.Event()
        self.start = threading.Event()
        self._seen: set[Event] = set()

    def chooses(self, stream: str, event: Event) -> bool:
        """Whether this is the wait to be left out; if so, what it is for is held back."""
        if stream != self.stream or event.wait(0.0) or self.labels.get(event, "computed") != self.label:
            return False
        if self.chosen is not None or event in self._seen:
            return False
        self._seen.add(event)
        if len(self._seen) <= self.number:
            return False
        self.chosen = event
        if event in self.producers:
            self.producers[event].held = True
        return True

    def make_device(self, index: int) -> SabotagedDevice:
        return SabotagedDevice(index, self)

    def before_run(self, engine: Any, optimizer: Any) -> None:
        """Labels events as they are made, and takes the optimizer into the game."""
        for worker in engine._workers:
            for ring, label in (
                (worker._weight_ring, "weight buffer free"),
                (worker._accumulators._ring, "gradient buffer free"),
                (worker._input_ring, "input buffer free"),
                (worker._grad_input_ring, "output gradient buffer free"),
                (worker._kept_ring, "kept buffer free"),
            ):
                self._label_ring(ring, label)
            if worker._accumulators._rounds:
                self._label_ring(worker._accumulators._rounded_ring, "rounded buffer free")
            self._label_slots(worker)
        self._watch_updates(engine._controller)
        self._hold_optimizer(optimizer)
        flush = engine.flush

        def flush_and_start() -> None:
            flush()
            self.start.set()

        engine.flush = flush_and_start

    def _label_ring(self, ring: Ring, label: str) -> None:
        take = ring.next

        def labelled() -> Any:
            buffer, free, freed = take()
            self.labels[free] = label
            return buffer, free, freed

        ring.next = labelled  # type: ignore[method-assign]

    def _label_slots(self, worker: Any) -> None:
        enqueue: Callable[[Slot], None] = worker.enqueue

        def labelled(slot: Slot) -> None:
            self.labels[slot.uploaded] = "uploaded"
            self.labels.update((copy.written, "written") for copy in slot.weights)
            self.labels.update((c.after, "landed" if c.goes_on else "gradient used") for c in slot.gradients)
            for task in slot.tasks:
                for reading in [*task.inputs.values(), *([task.grad_input] if task.grad_input else [])]:
                    self.labels[reading.boundary.delivered] = "delivered"
                    self.labels[reading.done] = "arrived"
                for reading in task.kept_inputs.values():
                    self.labels[reading.boundary.delivered] = "kept delivered"
                    self.labels[reading.done] = "kept arrived"
            enqueue(slot)

        worker.enqueue = labelled

    def _watch_updates(self, controller: Any) -> None:
        send = controller._send_update

        def watched(update: Any) -> None:
            events = [(event, "landed") for event in update.ticket.landed]
            events += [(event, "loss") for event in update.ticket.losses.ready]
            for event, label in events:
                self.labels[event] = label
                self.chooses("optimizer", event)
            send(update)

        controller._send_update = watched

    def _hold_optimizer(self, optimizer: Any) -> None:
        apply, wait = optimizer._apply, optimizer._wait
        behind = -1

        def held_apply(update: Any) -> Any:
            self.start.wait(_LONGEST_SECONDS)
            if self.chosen in update.ticket.read or self.chosen in update.after.written:
                self.harmed.wait(self.patience_seconds)
            return apply(update)

        def leaving_out(events: list[Event], cause: str = "") -> None:
            nonlocal behind
            behind += behind >= 0
            if behind == self.tasks:  # what stood behind the one left out has run
                self.harmed.set()
            if self.stream == "optimizer" and self.chosen in events and self.leave_out:
                events = [event for event in events if event is not self.chosen]
                behind = 0
            wait(events, cause)

        optimizer._apply, optimizer._wait = held_apply, leaving_out


class Work:
    """A task of a stream that may be held back, or be the one that does the harm."""

    def __init__(self, task: Callable[[], object], sabotage: Sabotage, does_harm: bool) -> None:
        self._task, self._sabotage, self._does_harm = task, sabotage, does_harm
        self.held = False

    def __call__(self) -> None:
        if self.held:
            self._sabotage.harmed.wait(self._sabotage.patience_seconds)
        try:
            self._task()
        finally:  # harm may be that it raises; what is held back would else outlive the run by half a minute
            if self._does_harm:
                self._sabotage.harmed.set()


class SabotagedStream(Stream):
    """A stream that leaves out the wait that its sabotage chooses."""

    def __init__(self, name: str, failure: Failure, delays: Delays, purpose: str, sabotage: Sabotage) -> None:
        super().__init__(name, failure, delays)
        self._purpose, self._sabotage = purpose, sabotage
        self._tasks_until_harm = 0
        self._last: Work | None = None
        super().run(lambda: sabotage.start.wait(_LONGEST_SECONDS) and None, "the start")

    def run(self, task: Callable[[], object], what: str, copied_bytes: int = 0) -> None:
        self._last = Work(task, self._sabotage, self._tasks_until_harm == 1)
        self._tasks_until_harm -= 1
        super().run(self._last, what, copied_bytes)

    def wait(self, event: Event, cause: str = "") -> None:
        if self._sabotage.chooses(self._purpose, event):
            self._tasks_until_harm = self._sabotage.tasks
            if self._sabotage.leave_out:
                return
        super().wait(event, cause)

    def record(self, event: Event) -> Event:
        if self._last is not None:
            self._sabotage.producers[event] = self._last
        return super().record(event)


class SabotagedDevice(CpuDevice):
    """A CPU stand-in whose streams are sabotaged."""

    def __init__(self, index: int, sabotage: Sabotage) -> None:
        super().__init__(index)
        self._sabotage = sabotage

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        return SabotagedStream(f"{self.name} {purpose}", failure, delays, purpose, self._sabotage)
