"""Host memory that a run takes because it is free: touched behind the back of training, as far as it is there."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable

import torch

from rpft.engine.streams import EngineThread
from rpft.host import available_cores
from rpft.model.pages import absent_pages, touch
from rpft.optim.threads import openmp_threads
from rpft.plan.bill import available_host_bytes, gib

logger = logging.getLogger(__name__)

_STEP_BYTES = 1 << 30
"""Touched at once: as little as keeps several threads busy."""

_SHARE_OF_CORES = 0.25
"""That touch, so that training has the rest."""


class SpareMemory:
    """A run of bytes, of which those up to ``ready_bytes`` are there. For one thread, but for ``place``."""

    def __init__(self, changed: threading.Condition, available: Callable[[], int] = available_host_bytes) -> None:
        """``changed``: notified when more is there. ``available``: bytes of RAM that may still be taken."""
        self._changed, self._available = changed, available
        self._mapping: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._touched = 0
        self._wanted = 0
        self._thread: threading.Thread | None = None

    @property
    def ready_bytes(self) -> int:
        """That may be written to."""
        return min(self._touched, self._wanted)

    def place(self, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop``, uint8."""
        return self._bytes[start:stop]

    def take(self, num_bytes: int, left_free_bytes: int) -> None:
        """Has ``num_bytes`` touched from now on, or as many as leave that much of RAM free; does not wait.

        What was ever taken is the most that can be. To be called after ``limit`` where there was more.
        """
        if num_bytes == 0 or (self._thread is not None and self._thread.is_alive()):
            return
        if self._mapping is None:
            try:
                self._mapping = absent_pages(num_bytes)
            except OSError as error:
                logger.warning("there is no RAM for copies while a checkpoint is written (%s)", error.strerror)
                return
            if hasattr(mmap, "MADV_DONTFORK"):  # a child has no use for it
                self._mapping.madvise(mmap.MADV_DONTFORK)
            self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        with self._changed:
            self._wanted = min(num_bytes, len(self._bytes))
        self._thread = EngineThread(lambda: self._touch(left_free_bytes), "spare memory")
        self._thread.start()

    def limit(self, num_bytes: int) -> None:
        """Lets no more than ``num_bytes`` be written to; see ``trim``."""
        with self._changed:
            self._wanted = min(self._wanted, num_bytes)
        self.wait()

    def trim(self) -> None:
        """Gives the memory beyond the limit back to the system."""
        start = -(-self._wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._mapping is not None and start < self._touched:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, len(self._mapping) - start)
            self._touched = start

    def wait(self) -> None:
        """Returns when all is touched that will be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Gives all of it back."""
        self.limit(0)
        self._bytes, self._mapping = torch.empty(0, dtype=torch.uint8), None
        self._touched = 0

    def _touch(self, left_free_bytes: int) -> None:
        with openmp_threads(max(1, int(_SHARE_OF_CORES * available_cores()))):
            while (start := self._touched) < self._wanted:
                stop = min(start + _STEP_BYTES, self._wanted)
                if self._available() - (stop - start) < left_free_bytes:
                    logger.warning(
                        "other programs have taken RAM since the run was planned: of %s for copies while a"
                        " checkpoint is written %s are taken, so a save may hold up training longer",
                        gib(self._wanted),
                        gib(start),
                    )
                    return
                touch(self._bytes[start:stop])
                with self._changed:
                    self._touched = stop
                    self._changed.notify_all()
