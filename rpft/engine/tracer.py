"""Notes what streams do while a trace runs, without synchronising; a stream that is not traced pays nothing.

    tracer = Tracer([*streams])
    tracer.start()
    ...                       # every task that a stream starts now is noted
    trace = tracer.stop()

A stream's ``stamp`` is a point of its order: the host's time for a CPU stream, an event for a CUDA one. Its
``clock`` says afterwards when that was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from rpft.engine.trace import HOST, PART, TASK, WAIT, Span, Trace

if TYPE_CHECKING:
    from rpft.engine.streams import Stream


class Clock(Protocol):
    """Tells the time of stamps. Seconds are those of ``time.perf_counter``."""

    def start(self) -> None:
        """Called before the first stamp; may synchronise."""
        ...

    def finish(self) -> None:
        """Called after the last stamp; afterwards all of them have a time."""
        ...

    def seconds(self, stamp: Any) -> float:
        """When ``stamp`` was."""
        ...


class HostClock:
    """The clock of stamps that are the host's time already."""

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def seconds(self, stamp: float) -> float:
        return stamp


class Recorder:
    """Notes what one stream does, in the stream's own thread; times are looked up when the trace is over."""

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self.notes: list[tuple[str, str, Any, Any, float, int]] = []
        """(nature, what, first stamp, last stamp, host time of issue, bytes)."""
        self._stamp = stamp
        self._waiting: tuple[Any, float] | None = None
        self._what = ""

    def wait_begins(self) -> None:
        """The stream may stand still from here on, until its next task."""
        if self._waiting is None:
            self._waiting = self._stamp(), time.perf_counter()

    def carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        """Does ``task`` and notes it, and the wait before it."""
        issued, first = time.perf_counter(), self._stamp()
        if self._waiting is not None:
            since, asked = self._waiting
            self._waiting = None
            self.notes.append((WAIT, f"wait: {what}", since, first, asked, 0))
        self._what, _thread.recorder = what, self
        task()
        _thread.recorder = None
        self.notes.append((TASK, what, first, self._stamp(), issued, copied_bytes))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Notes what happens inside as a part of the current task."""
        issued, first = time.perf_counter(), self._stamp()
        yield
        self.notes.append((PART, f"{self._what}: {name}", first, self._stamp(), issued, 0))


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


def span(name: str) -> AbstractContextManager[None]:
    """Inside a task of a traced stream: notes the block as a part of the task. Elsewhere it does nothing."""
    recorder = _thread.recorder
    return nullcontext() if recorder is None else recorder.part(name)


class Tracer:
    """Traces ``streams`` from ``start`` to ``stop``; again if wanted. Rows of the trace are in their order."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._clocks = list({id(stream.clock): stream.clock for stream in streams}.values())
        self._origin_seconds = 0.0

    def start(self) -> None:
        """Begins to note tasks; waits once for what the devices have been given so far."""
        for clock in self._clocks:
            clock.start()
        self._origin_seconds = time.perf_counter()
        for stream in self._streams:
            stream.recorder = Recorder(stream.stamp)

    def stop(self) -> Trace:
        """Ends the trace; waits for what devices have been given. Tasks still being issued are left out."""
        stopped = time.perf_counter() - self._origin_seconds
        recorders = [stream.recorder for stream in self._streams]
        for stream in self._streams:
            stream.recorder = None
        notes = [list(recorder.notes) if recorder is not None else [] for recorder in recorders]
        for clock in self._clocks:
            clock.finish()
        rows, spans = [], []
        for stream, noted in zip(self._streams, notes, strict=True):
            worker, stream_name = _row(stream.name)
            rows.append((worker, stream_name))
            for nature, what, first, last, issued, copied_bytes in noted:
                start = stream.clock.seconds(first) - self._origin_seconds
                end = max(start, stream.clock.seconds(last) - self._origin_seconds)
                issued -= self._origin_seconds
                spans.append(Span(worker, stream_name, nature, what, start, end, issued, copied_bytes))
        return Trace(rows, spans, 0.0, max([stopped, *(s.end_seconds for s in spans)]))


def _row(name: str) -> tuple[str, str]:
    """Worker and purpose in a stream's name; a device's name has a colon."""
    first, _, rest = name.partition(" ")
    return (first, rest) if ":" in first and rest else (HOST, name)
