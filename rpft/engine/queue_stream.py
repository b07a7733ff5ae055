"""A stream that issues its tasks to a device's own queue, and goes on before the device has done them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.tracer import Clock

_TASKS_IN_FLIGHT = 6
"""Tasks of a stream issued and not complete: enough to hide launching, few enough to bound memory. A forward of a
layer is one, its recompute and backward are two or three."""


class Mark(Protocol):
    """A point of a queue's order."""

    def synchronize(self) -> None:
        """Blocks the thread until the device is there."""
        ...

    def query(self) -> bool:
        """Whether it is."""
        ...


class Queue(Protocol):
    """What a device carries out in order; ``torch.cuda.Stream`` is one."""

    def record_event(self) -> Mark:
        """A mark behind all that was issued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is issued from now on starts when the device is at ``event``, a mark of any queue."""
        ...


class QueueStream(Stream):
    """A stream whose tasks issue work to ``native``; waits between queues never block the host.

    A mark that is reached is not waited for: the calls that wait let go of the interpreter, and a thread that has
    nothing to wait for would stand behind all others that want it.
    """

    def __init__(self, name: str, failure: Failure, delays: Delays, native: Queue, clock: Clock) -> None:
        self.native, self.clock = native, clock
        self._in_flight: deque[Mark] = deque()
        self._point: Mark | None = None
        """The mark behind all that was issued so far, if there is one."""
        super().__init__(name, failure, delays)

    def _carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        super()._carry_out(task, what, copied_bytes)
        self._point = self.native.record_event()
        self._in_flight.append(self._point)
        if len(self._in_flight) > _TASKS_IN_FLIGHT:
            oldest = self._in_flight.popleft()
            if not oldest.query():
                oldest.synchronize()

    def _settle(self) -> None:
        # Behind the last thread the memory goes that copies still read and write; a fault leaves some under way.
        try:
            while self._in_flight:
                self._in_flight.popleft().synchronize()
        except RuntimeError as error:  # the device itself is broken, and does nothing any more
            self._failure.set(error)

    def _await(self, event: Event) -> None:
        event.wait_issued(self._failure)
        if event.native is not None and not event.native.query():
            self._point = None
            self.native.wait_event(event.native)

    def _mark(self, event: Event) -> None:
        if self._point is None:
            self._point = self.native.record_event()
        event.set(self._point)
