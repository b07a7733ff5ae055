"""Streams and events: in-order queues of tasks, each on a thread of its own, ordered across by events.

A stream is the same thing on both devices. On the CPU its thread does the work; on CUDA its thread issues the
work to a CUDA stream. So nothing but a stream's own thread ever blocks: not the controller, not a neighbour.

An event happens once. Work that a CUDA stream has yet to reach leaves its mark in ``native``; an event of the
CPU (the optimizer's) has none.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from rpft.engine.failure import POLL_SECONDS, Cancelled, Ending, EngineError
from rpft.engine.tracer import Clock, HostClock, Recorder

_gates_change = threading.Lock()
"""Held while some event's list of those who sleep changes."""


class Event:
    """Something that happens once: unset, then issued (``native`` is left to wait for), then complete.

    A step has thousands, most of which happen before anybody asks: who has to sleep brings the lock to sleep on.
    """

    __slots__ = ("_gates", "_issued", "native")

    def __init__(self) -> None:
        self._issued = False
        self._gates: tuple[threading.Lock, ...] = ()
        """Locks of threads that sleep until the event is issued."""
        self.native: Any = None

    def set(self, native: Any = None) -> None:
        self.native = native
        self._issued = True  # before the look at who sleeps, as who wants to sleep looks at this last
        if self._gates:
            with _gates_change:
                gates, self._gates = self._gates, ()
            for gate in gates:
                gate.release()

    @property
    def complete(self) -> bool:
        """Whether what the event marks is done; does not block."""
        return self._issued and (self.native is None or self.native.query())

    def wait(self, timeout_seconds: float) -> bool:
        """Blocks the thread until the event is issued, at most so long; whether it is."""
        if self._issued:
            return True
        gate = threading.Lock()
        gate.acquire()
        with _gates_change:
            self._gates += (gate,)
        if not self._issued and not gate.acquire(timeout=timeout_seconds):
            with _gates_change:
                self._gates = tuple(each for each in self._gates if each is not gate)
        return self._issued

    def wait_issued(self, failure: Ending) -> None:
        """Blocks the thread until the event is issued; ends the thread if the engine failed meanwhile."""
        while not self.wait(POLL_SECONDS):
            failure.cancel_if_failed()

    def synchronize(self, failure: Ending) -> None:
        """Blocks the thread until what the event marks is complete."""
        self.wait_issued(failure)
        # Asked first: who waits lets go of the interpreter, and gets it back only when nobody computes.
        if self.native is not None and not self.native.query():
            self.native.synchronize()


def happened() -> Event:
    """An event that is already complete."""
    event = Event()
    event.set()
    return event


class Delays:
    """Random pauses before every task of every thread, drawn from a seed, to bring out a missing wait."""

    def __init__(self, seed: int | None, longest_seconds: float = 0.004) -> None:
        self.seed, self.longest_seconds = seed, longest_seconds

    def of(self, thread: str) -> Callable[[], None]:
        """The pause of one thread, by name: a failing seed replays the same pauses."""
        if self.seed is None:
            return lambda: None
        rng = random.Random(f"{self.seed} {thread}")
        pause = threading.Event()  # never set: waiting on it is a sleep

        def sleep() -> None:
            draw = rng.random()
            if draw > 0.5:
                pause.wait(self.longest_seconds * (2 * draw - 1) ** 3)

        return sleep


class EngineThread(threading.Thread):
    """A thread of the engine or the optimizer. A process that still has one must not end in the ordinary way.

    torch aborts when the interpreter goes while a thread is inside one of its operations.

    Ctrl-C is for the main thread, which saves the run. A terminal sends it to child processes too: a compiler that
    a stream has started would die of it, and the run with the compiler. What a thread blocks, its children block.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        super().run()


_Entry = tuple[Callable[..., object], tuple[Any, ...], str]
"""What a stream does next: a function, its arguments, and what that is called."""


class Stream:
    """An in-order queue of tasks on its own thread. ``run``, ``wait`` and ``record`` return at once.

    ``recorder`` is where a trace has the stream's tasks noted, None while there is no trace; see ``Tracer``.
    """

    clock: Clock = HostClock()
    """Says when a ``stamp`` of this stream was."""

    def __init__(self, name: str, failure: Ending, delays: Delays) -> None:
        self.name = name
        self.recorder: Recorder | None = None
        self.task = ""
        """What the stream is at, empty when at nothing; for a report on who waits for whom."""
        self.tasks_done = 0
        self._failure = failure
        self._pause = delays.of(name)
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        """Tasks, and None behind the last."""
        self._closing = False
        self._thread = EngineThread(self._loop, name)
        self._thread.start()

    def run(self, task: Callable[[], object], what: str, copied_bytes: int = 0) -> None:
        """Queues ``task``; ``what`` names it in a trace and in the report of a fault.

        ``copied_bytes`` above 0 says that the task moves so many bytes between the host and a device or disk.
        """
        self._put(self._carry_out, (task, what, copied_bytes), what)

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Queues the copy of a whole tensor between the host and a device."""
        self.run(lambda: target.copy_(source, non_blocking=True), what, copied_bytes=source.nbytes)

    def copy_giving_way(self, target: Tensor, source: Tensor, what: str) -> None:
        """As ``copy``, of long flat tensors; other streams' copies the same way need not wait for all."""
        self.copy(target, source, what)

    def wait(self, event: Event, cause: str = "") -> None:
        """What is queued after this starts when ``event`` is complete; ``cause`` says what that is in a trace."""
        self._put(self._stand, (event, cause), "a wait")

    def wait_on_host(self, event: Event, cause: str = "") -> None:
        """As ``wait``, but what is queued after this is not even issued before ``event`` is complete.

        Device memory is taken when work is issued: only so does it wait for memory that ``event`` makes free.
        """
        self._put(self._stand_on_host, (event, cause), "a wait")

    def record(self, event: Event) -> Event:
        """``event`` completes when what is queued before this is done."""
        self._put(self._mark, (event,), "a mark")
        return event

    def uses(self, tensor: Any) -> None:
        """Tells the device's allocator that this stream reads ``tensor``, which another stream made."""

    def stamp(self) -> Any:
        """Marks this point of the stream's order, for a trace; called by the stream's own thread."""
        return time.perf_counter()

    def _carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        recorder = self.recorder
        if recorder is None:
            task()
        else:
            recorder.carry_out(task, what, copied_bytes)

    def _stand(self, event: Event, cause: str) -> None:
        self._note_wait(cause)
        self._await(event)

    def _stand_on_host(self, event: Event, cause: str) -> None:
        self._note_wait(cause)
        event.synchronize(self._failure)

    def _note_wait(self, cause: str) -> None:
        recorder = self.recorder
        if recorder is not None:
            recorder.wait_begins(cause)

    def _await(self, event: Event) -> None:
        event.synchronize(self._failure)

    def _mark(self, event: Event) -> None:
        event.set()

    def _enter(self) -> Any:
        """Called once in the stream's thread; the result is kept while it runs."""

    def _settle(self) -> None:
        """Called last in the stream's thread: returns when what it has issued is done."""

    def _put(self, call: Callable[..., object], arguments: tuple[Any, ...], what: str) -> None:
        assert not self._closing, f"stream {self.name} is closed"
        self._queue.put((call, arguments, what))

    def _next(self) -> _Entry | None:
        while True:
            with suppress(Empty):
                return self._queue.get(timeout=POLL_SECONDS)
            self._failure.cancel_if_failed()

    def _loop(self) -> None:
        what = "its start"
        try:
            context = self._enter()
            while (entry := self._next()) is not None:
                call, arguments, what = entry
                self._failure.cancel_if_failed()
                self._pause()
                self.task = what
                call(*arguments)
                del entry, call, arguments
                self.task = ""
                self.tasks_done += 1
            del context
        except Cancelled:
            pass
        except BaseException as error:
            fault = EngineError(f"{self.name}: {what} failed: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._failure.set(fault)
        finally:
            self._drop()
            self._settle()

    def _drop(self) -> None:
        """Lets go of what is queued, which holds a device's memory."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def close(self) -> None:
        """Lets queued tasks finish (or be dropped after a fault) and asks the thread to end."""
        self._closing = True
        self._queue.put(None)

    @property
    def thread_id(self) -> int | None:
        """The identity of the stream's thread, None when it has ended."""
        return self._thread.ident if self._thread.is_alive() else None

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread, which ends when what it has issued is done; False when it still runs."""
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._drop()  # some may have come after a fault had ended it
        return True
