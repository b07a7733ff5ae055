"""What of a save is written, what lies copied, what is neither: between the saver's thread and the optimizer's.

    pieces      | written . . . | at work | copied . . . . . . . . | not yet touched . . . . . . . . . . . |
                                  saver ->                           <- optimizer, up to the end of its layer

Pieces are in the order of the files, in which layers are updated too. The optimizer copies them while it has
nothing else to do, at the latest those of a layer that it is about to change; the saver writes from the copies,
and their places come free in the same order: a ring. Where it is full the optimizer waits for the saver, a piece
at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rpft.engine.failure import POLL_SECONDS, EngineError, Failure
from rpft.engine.tracer import span
from rpft.model.layout import LayerLayout, align
from rpft.model.moments import StateFormat
from rpft.train.checkpoint_layers import piece_sizes
from rpft.train.shards import Piece
from rpft.train.spare_memory import SpareMemory

_ALIGNMENT_BYTES = 64

_COPIED_AT_ONCE = 1 << 28
"""Bytes: one call, which waits for the GIL but once, while other threads issue the next step."""

_PATIENCE_SECONDS = 5.0
"""How long a save waits, after a fault, for copies that are being made: they take far less, or never end."""


def copies_bytes(layouts: Sequence[LayerLayout], lagging: bool, state_format: StateFormat) -> int:
    """Bytes that copies of all that a checkpoint holds take."""
    return sum(
        align(size, _ALIGNMENT_BYTES) for each in layouts for size in piece_sizes(each, lagging, state_format)
    )


class Ring:
    """Places in a run of bytes, given out and taken back in one order."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, int]] = deque()
        """(start, stop) of each, the oldest first."""

    def __len__(self) -> int:
        return len(self._taken)

    def reserve(self, num_bytes: int, capacity: int) -> int | None:
        """Where ``num_bytes`` in one piece begin below ``capacity``; None where there is no room."""
        size, start, end = align(num_bytes, _ALIGNMENT_BYTES), 0, capacity
        if self._taken:
            oldest, (newest, start) = self._taken[0][0], self._taken[-1]
            if newest < oldest:
                end = oldest
            elif start + size > capacity:
                start, end = 0, oldest
        if start + size > min(end, capacity):
            return None
        self._taken.append((start, start + size))
        return start

    def release(self) -> None:
        """Takes the oldest place back."""
        self._taken.popleft()


class SaveCopies:
    """The pieces of one save. ``take`` is the saver's to call, ``copy_ahead`` and ``free`` the optimizer's."""

    def __init__(
        self,
        layers: Mapping[int, Sequence[Piece]],
        memory: SpareMemory,
        changed: threading.Condition,
        failure: Failure,
    ) -> None:
        """``layers``: the pieces of each, in the order of updates. ``changed``: notified when ``memory`` grows."""
        self._pieces: list[Piece] = []
        self._parts: dict[int, tuple[int, int]] = {}
        """Of each layer the number of its first piece, and the end of its pieces."""
        for layer, pieces in layers.items():
            self._parts[layer] = len(self._pieces), len(self._pieces) + len(pieces)
            self._pieces += pieces
        self._memory, self._changed, self._failure = memory, changed, failure
        self._ring = Ring()
        self._copies: deque[tuple[int, list[torch.Tensor]]] = deque()
        """(number of the piece, copies of what it lies in), not yet written."""
        self._taken = 0
        """Pieces that the saver has begun or written."""
        self._copied = 0
        """The end of those that are copied."""
        self._from_store: int | None = None
        """The piece that is written from where the optimizer would change it."""
        self._copying = range(0)
        self._over = False
        self.copied_bytes = 0
        self.stall_seconds = 0.0
        """For which ``free`` has held up its caller."""

    @property
    def in_use(self) -> bool:
        """Whether any of the memory is."""
        return not self._over and len(self._ring) > 0

    def end(self) -> None:
        """Nobody waits for the save any more: it is whole, or will not be."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # -- the saver -----------------------------------------------------------------------------------------

    @contextmanager
    def take(self, piece: Piece) -> Iterator[Sequence[torch.Tensor]]:
        """What the next piece lies in, or its copies, until it is written.

        EngineError where after a fault its copying does not end: the save will not be whole.
        """
        with self._changed:
            number = self._taken
            assert piece.num_bytes == self._pieces[number].num_bytes
            self._await_copy(number)
            self._taken += 1
            copies = self._copies.popleft()[1] if self._copies and self._copies[0][0] == number else None
            if copies is None:
                self._from_store = number
        yield piece.stored() if copies is None else copies
        with self._changed:
            if copies is None:
                self._from_store = None
            else:
                self._ring.release()
            self._changed.notify_all()

    def _await_copy(self, number: int) -> None:
        """Returns when nobody copies the piece."""
        failed_at = None
        while number in self._copying:
            self._changed.wait(POLL_SECONDS)
            now = time.monotonic()
            if failed_at is None:
                failed_at = now if self._failure.failed else None
            elif now - failed_at > _PATIENCE_SECONDS:
                raise EngineError("a copy for the checkpoint was begun, and not ended when the run had failed")

    # -- the optimizer -------------------------------------------------------------------------------------

    def copy_ahead(self) -> bool:
        """Copies the next pieces; False where there are none, or no room for them."""
        with self._changed:
            return not self._over and self._copy_some(len(self._pieces))

    def free(self, layer: int) -> None:
        """Returns when what the save holds of ``layer`` is written or copied, so that it may change.

        Layers must come in their order.
        """
        first, stop = self._parts[layer]
        began = time.monotonic()
        before = self.stall_seconds
        with self._changed:
            while not self._over and self._needed(first, stop):
                if not self._copy_some(stop):
                    self._failure.cancel_if_lost()
                    self._changed.wait(POLL_SECONDS)
                self.stall_seconds = before + time.monotonic() - began

    def _needed(self, first: int, stop: int) -> bool:
        if max(self._taken, self._copied) < stop:
            return True
        return self._from_store is not None and first <= self._from_store < stop

    def _copy_some(self, stop: int) -> bool:
        """Copies pieces before ``stop`` that nobody has begun, if there is room; lets go of the lock meanwhile."""
        first = max(self._taken, self._copied)
        places, size = [], 0
        for piece in self._pieces[first:stop]:
            start = self._ring.reserve(piece.num_bytes, self._memory.ready_bytes)
            if start is None:
                break
            places.append((piece, self._memory.place(start, start + piece.num_bytes)))
            size += piece.num_bytes
            if size >= _COPIED_AT_ONCE:
                break
        if not places:
            return False
        self._copying = range(first, first + len(places))
        self._changed.release()
        try:
            with span("copies for a checkpoint"):
                copies = _copied(places)
        finally:
            self._changed.acquire()
            copied, self._copying = self._copying, range(0)
            self._changed.notify_all()
        self._copied = copied.stop
        self._copies += zip(copied, copies, strict=True)
        self.copied_bytes += size
        return True


def _copied(places: Sequence[tuple[Piece, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Copies of what each piece lies in, in its place, uint8, one behind the other."""
    targets, sources, copies = [], [], []
    for piece, place in places:
        start, stored = 0, piece.stored()
        for part in stored:  # they have numbers of one size, so that each begins where it may
            targets.append(place[start : start + part.nbytes].view(part.dtype))
            start += part.nbytes
        sources += stored
        copies.append(targets[-len(stored) :])
    torch._foreach_copy_(targets, sources)
    return copies
