"""How one fault ends every thread: the first error is kept, and every wait gives up."""

from __future__ import annotations

import threading

POLL_SECONDS = 0.2
"""How often a waiting thread looks whether another one failed; bounds how long threads outlive a fault."""


class EngineError(RuntimeError):
    """A fault of a running engine; the message names stage, microbatch and device, the cause is chained."""


class Cancelled(BaseException):
    """Ends a thread whose work is no longer wanted; never reaches a person."""


class Failure:
    """Shared by all threads of an engine. ``set`` keeps the first error."""

    def __init__(self) -> None:
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = error
            self._failed.set()

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
