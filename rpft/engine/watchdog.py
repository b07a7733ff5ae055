"""Ends a run that stands still: when no stream has finished a task for a while, it says who waits for whom."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rpft.engine.failure import Failure
from rpft.engine.streams import Event, Stream

_LOOKS = 20
"""Looks at the streams within the time that is allowed."""


class Stalled(RuntimeError):
    """The engine made no progress for too long; the message says what each stream was at."""


class Watchdog:
    """Watches the streams of an engine, from a thread of its own, while somebody waits for them."""

    def __init__(
        self,
        streams: Sequence[Stream],
        stall_seconds: float,
        failure: Failure,
        other_progress: Callable[[], int] = lambda: 0,
    ) -> None:
        """``other_progress``: a number that grows with work which no stream does."""
        self._streams, self._stall_seconds, self._failure = streams, stall_seconds, failure
        self._other_progress = other_progress
        self._expected: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """While inside, the streams must make progress: somebody waits for ``what``."""
        self._expected = what
        try:
            yield
        finally:
            self._expected = None

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _progress(self) -> int:
        return sum(stream.tasks_done for stream in self._streams) + self._other_progress()

    def _watch(self) -> None:
        interval = self._stall_seconds / _LOOKS
        last, stood, looked = -1, 0.0, time.monotonic()
        while not self._closing.wait(interval):
            progress, expected, now = self._progress(), self._expected, time.monotonic()
            # A look that comes late is of a process that was stopped (Ctrl-Z, a frozen container) as a whole.
            stood += min(now - looked, 2 * interval)
            looked = now
            if expected is None or progress != last:
                last, stood = progress, 0.0
            elif stood >= self._stall_seconds and not self._failure.failed:
                self._failure.set(
                    Stalled(
                        f"no progress for {self._stall_seconds:g} seconds (engine.stall_seconds) in {expected}."
                        f" {who_waits(self._streams)}"
                    )
                )
                return


def who_waits(streams: Sequence[Stream]) -> str:
    """What each stream is at: those that work, which the others wait for, first."""
    frames = sys._current_frames()
    busy, waiting, dead = [], [], []
    for stream in streams:
        thread = stream.thread_id
        if thread is None:
            dead.append(stream.name)
        elif stream.task:
            place = _place(frames.get(thread))
            (waiting if place is None else busy).append(
                f"{stream.name}: {stream.task}" + (f" (at {place})" if place else "")
            )
    found = [("Its thread has ended", dead), ("At work", busy), ("Waiting", waiting)]
    return ". ".join(f"{title}: {'; '.join(names)}" for title, names in found if names) or "No stream has work"


def _place(frame: object) -> str | None:
    """file:line where a thread works; None where it waits for an event."""
    waits = (Event.wait_issued.__code__, Event.synchronize.__code__)
    innermost = frame
    while frame is not None:
        if frame.f_code in waits:  # type: ignore[attr-defined]
            return None
        frame = frame.f_back  # type: ignore[attr-defined]
    if innermost is None:
        return "its start"
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}"  # type: ignore[attr-defined]
