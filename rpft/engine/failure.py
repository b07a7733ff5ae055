"""How one fault ends every thread: the first error is raised, every wait gives up, and none is forgotten."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

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
    """Shared by all threads of an engine. ``set`` keeps all errors, the first of which is the engine's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: tuple[BaseException, ...] = ()

    @property
    def errors(self) -> tuple[BaseException, ...]:
        """All, in the order in which they came."""
        return self._errors

    @property
    def error(self) -> BaseException | None:
        """The first."""
        return self._errors[0] if self._errors else None

    def set(self, error: BaseException) -> None:
        """Notes an error. The log has each, since one is raised at most."""
        with self._lock:
            if any(error is known for known in self._errors):  # raised in the main thread, which tells it again
                return
            self._errors += (error,)
            told = "every thread ends" if len(self._errors) == 1 else "while every thread ends"
        logger.info("%s: %s: %s", told, type(error).__name__, error)

    def clear(self) -> None:
        """Forgets all. To be called when all threads that an error ended are gone, before there are new ones."""
        with self._lock:
            self._errors = ()

    @property
    def failed(self) -> bool:
        return bool(self._errors)

    def raise_if_failed(self) -> None:
        """Raises the first error, for the thread that reports it."""
        error = self.error
        if error is not None:
            raise error

    def cancel_if_failed(self) -> None:
        """Ends the calling engine thread."""
        if self._errors:
            raise Cancelled

    @property
    def lost(self) -> bool:
        """Whether it failed in a way that the run cannot go on after: of several errors one is enough."""
        return not all(map(out_of_device_memory, self._errors))

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
