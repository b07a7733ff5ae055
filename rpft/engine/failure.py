"""How one fault ends every thread: the first error is kept, and every wait gives up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch

POLL_SECONDS = 0.2
"""How often a waiting thread looks whether another one failed; bounds how long threads outlive a fault."""

_ALLOCATION_FAILED = ("CUDA error: out of memory", "HIP error: out of memory", "_STATUS_ALLOC_FAILED")
"""What errors say that libraries raise beside torch's own when a device has no memory left for them."""


class EngineError(RuntimeError):
    """A fault of a running engine; the message names stage, microbatch and device, the cause is chained."""


class Cancelled(BaseException):
    """Ends a thread whose work is no longer wanted; never reaches a person."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it comes from."""
    while error is not None:
        yield error
        error = error.__cause__


def out_of_device_memory(error: BaseException) -> bool:
    """Whether ``error`` comes from a device whose memory did not do."""
    return any(
        isinstance(cause, torch.OutOfMemoryError)
        or (isinstance(cause, RuntimeError) and any(text in str(cause) for text in _ALLOCATION_FAILED))
        for cause in causes(error)
    )


class Ending(Protocol):
    """What a thread asks of the faults of others, and tells of its own."""

    def set(self, error: BaseException) -> None:
        """Notes an error of the thread."""
        ...

    def cancel_if_failed(self) -> None:
        """Ends the calling thread where what others met is to end it."""
        ...


class Failure:
    """Shared by all threads of an engine. ``set`` keeps the first error."""

    def __init__(self) -> None:
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self._survivable = False

    def set(self, error: BaseException) -> None:
        with self._lock:
            first = self.error is None
            if first:
                self.error = error
            # Of several errors that come together each must be of the kind.
            self._survivable = (first or self._survivable) and out_of_device_memory(error)
            self._failed.set()

    def clear(self) -> None:
        """Forgets the error. To be called when all threads that it ended are gone, before there are new ones."""
        with self._lock:
            self.error, self._survivable = None, False
            self._failed.clear()

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def raise_if_failed(self) -> None:
        """Raises the first error, for the thread that reports it."""
        if self.error is not None:
            raise self.error

    def cancel_if_failed(self) -> None:
        """Ends the calling engine thread."""
        if self._failed.is_set():
            raise Cancelled

    @property
    def lost(self) -> bool:
        """Whether it failed in a way that the run cannot go on after."""
        return self.failed and not self._survivable

    def cancel_if_lost(self) -> None:
        """Ends the calling thread unless the run may go on after the failure, with what this thread has begun."""
        if self.lost:
            raise Cancelled


class Lasting:
    """``failure`` for a thread that what an update has begun needs: it ends when the run cannot go on."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def set(self, error: BaseException) -> None:
        self._failure.set(error)

    def cancel_if_failed(self) -> None:
        self._failure.cancel_if_lost()
