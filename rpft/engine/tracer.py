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
from typing import Any, NamedTuple, Protocol

from rpft.engine.trace import HOST, PART, TASK, WAIT, Span, Trace


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
        self.notes: list[_Note] = []
        self._stamp = stamp
        self._waits: list[tuple[str, Any, float]] = []
        """(cause, stamp, host time) of the waits since the last task."""
        self._task: _Note | None = None

    def wait_begins(self, cause: str) -> None:
        """The stream may stand still from here on, for ``cause``, until it has another cause or a task."""
        if not self._waits or self._waits[-1][0] != cause:
            self._waits.append((cause, self._stamp(), time.perf_counter()))

    def carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        """Does ``task`` and notes it, and the waits before it."""
        issued, first = time.perf_counter(), self._stamp()
        self.notes += _waits(self._waits, first, what)
        self._waits = []
        self._task, _thread.recorder = _Note(TASK, what, first, None, issued, copied_bytes), self
        try:
            task()
            self.notes.append(self._task._replace(last=self._stamp()))
        finally:
            self._task = _thread.recorder = None

    @contextmanager
    def part(self, name: str, nature: str, cause: str) -> Iterator[None]:
        """Notes what happens inside as a part of the current task."""
        issued, first = time.perf_counter(), self._stamp()
        yield
        assert self._task is not None
        self.notes.append(_Note(nature, f"{self._task.what}: {name}", first, self._stamp(), issued, 0, cause))

    def all_notes(self) -> list[_Note]:
        """What was noted, and, without a last stamp, what is still under way; any thread's."""
        task, waits = self._task, list(self._waits)
        under_way = _waits(waits, None, "what comes next") if task is None else [task]
        notes = list(self.notes)
        noted = {id(note.first) for note in notes[-2 - 2 * len(waits) :]}  # over by now
        return notes + [note for note in under_way if id(note.first) not in noted]


class _Note(NamedTuple):
    """A span before its times are known: ``first`` and ``last`` are stamps, no last one if it is not over."""

    nature: str
    what: str
    first: Any
    last: Any
    issued: float
    copied_bytes: int = 0
    cause: str = ""


def _waits(begun: list[tuple[str, Any, float]], last: Any, what: str) -> list[_Note]:
    """The waits before the task ``what``: each lasts until the next begins, and the last of them to ``last``."""
    ends = [*(stamp for _, stamp, _ in begun[1:]), last]
    return [
        _Note(WAIT, f"wait: {what}", stamp, end, asked, 0, cause)
        for (cause, stamp, asked), end in zip(begun, ends, strict=False)
    ]


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


def span(name: str) -> AbstractContextManager[None]:
    """Inside a task of a traced stream: notes the block as a part of the task. Elsewhere it does nothing."""
    return _part(name, PART, "")


def standing_still(cause: str) -> AbstractContextManager[None]:
    """As ``span``, of a block in which the task waits for ``cause``."""
    return _part(f"waits for {cause}", WAIT, cause)


def _part(name: str, nature: str, cause: str) -> AbstractContextManager[None]:
    recorder = _thread.recorder
    return nullcontext() if recorder is None else recorder.part(name, nature, cause)


class Traced(Protocol):
    """What a trace asks of a stream."""

    name: str
    clock: Clock
    recorder: Recorder | None

    def stamp(self) -> Any:
        """Marks a point of the stream's order, of which its clock knows the time afterwards."""
        ...


def being_traced(streams: Sequence[Traced]) -> bool:
    """Whether some trace has any of ``streams`` at the moment; a stream can be in one at a time."""
    return any(stream.recorder is not None for stream in streams)


class Tracer:
    """Traces ``streams`` from ``start`` to ``stop``; again if wanted. Rows of the trace are in their order."""

    def __init__(self, streams: Sequence[Traced]) -> None:
        self._streams = streams
        self._clocks = list({id(stream.clock): stream.clock for stream in streams}.values())
        self._origin_seconds = 0.0

    @property
    def origin_seconds(self) -> float:
        """When the trace began, on the clock of ``time.perf_counter``."""
        return self._origin_seconds

    def drop(self) -> None:
        """Ends the trace without a result, and waits for nothing; for an engine that failed."""
        for stream in self._streams:
            stream.recorder = None

    def start(self) -> None:
        """Begins to note tasks; waits once for what the devices have been given so far."""
        for clock in self._clocks:
            clock.start()
        self._origin_seconds = time.perf_counter()
        for stream in self._streams:
            stream.recorder = Recorder(stream.stamp)

    def stop(self) -> Trace:
        """Ends the trace; waits for what devices have been given. What is still under way ends with the trace."""
        stopped = time.perf_counter() - self._origin_seconds
        recorders = [stream.recorder for stream in self._streams]
        for stream in self._streams:
            stream.recorder = None
        notes = [[] if recorder is None else recorder.all_notes() for recorder in recorders]
        for clock in self._clocks:
            clock.finish()
        rows, spans = [], []
        for stream, noted in zip(self._streams, notes, strict=True):
            worker, stream_name = _row(stream.name)
            rows.append((worker, stream_name))
            for note in noted:
                start = stream.clock.seconds(note.first) - self._origin_seconds
                end = stopped
                if note.last is not None:
                    end = stream.clock.seconds(note.last) - self._origin_seconds
                elif start >= stopped:
                    continue
                issued = note.issued - self._origin_seconds
                times = start, max(start, end), issued
                spans.append(
                    Span(worker, stream_name, note.nature, note.what, *times, note.copied_bytes, note.cause)
                )
        return Trace(rows, spans, 0.0, max([stopped, *(s.end_seconds for s in spans)]))


def _row(name: str) -> tuple[str, str]:
    """Worker and purpose in a stream's name; a device's name has a colon."""
    first, _, rest = name.partition(" ")
    return (first, rest) if ":" in first and rest else (HOST, name)
