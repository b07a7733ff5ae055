"""Moments on their way between the disk and the optimizer: read ahead of the update, written behind it.

    optimizer from disk  | piece i + 1      | piece i + 2      | piece i + 3      |
    optimizer            |      | update i  |      | i + 1     |      | i + 2     |
    optimizer to disk    | piece i - 1      | piece i          | piece i + 1      |

Pieces are updated in one order, step after step, so that the first ones of the next step are read as soon as
buffers are free, while gradients are still computed. An update is over when all of it is in the file: what
reads the file then, a checkpoint, sees that update whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle

import torch

from rpft.engine.buffers import Ring
from rpft.engine.failure import Failure, Lasting
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.trace import BUFFER, DISK
from rpft.engine.tracer import standing_still
from rpft.model.moments import Moments
from rpft.model.moments_file import MomentsFile, Piece


class MomentsWindow:
    """The disk's side of an optimizer. ``pieces`` and ``settle`` are called by the optimizer's thread."""

    def __init__(self, file: MomentsFile, order: Sequence[int], failure: Failure, delays: Delays) -> None:
        """Begins to read; from now on nothing but this writes to ``file`` until it is closed.

        ``order``: of the layers, in every update.
        """
        self._file = file
        # They outlive a device without memory, since an update that has begun is finished then.
        self._failure = Lasting(failure)
        self._reader = Stream("optimizer from disk", self._failure, delays)
        self._writer = Stream("optimizer to disk", self._failure, delays)
        self.streams = [self._reader, self._writer]
        self._ring = Ring(file.window)
        self._coming = cycle([piece for layer in order for piece in file.of_layer(layer)])
        self._read: deque[tuple[Piece, torch.Tensor, Event, Event]] = deque()
        """(piece, buffer, when it is read, to be recorded when the buffer is free), in order."""
        for _ in file.window:
            self._read_ahead()

    def pieces(self, layer: int) -> Iterator[tuple[slice, Moments]]:
        """(parameters of ``layer``, their moments), piece by piece, each to be changed in place.

        Layers must come in the order given, all that have any, and each to its end.
        """
        for expected in self._file.of_layer(layer):
            piece, buffer, loaded, freed = self._read.popleft()
            assert piece is expected, (piece, expected)
            with standing_still(DISK):
                loaded.synchronize(self._failure)
            yield piece.part, self._file.moments_in(piece, buffer)
            keep = partial(self._file.keep, piece, buffer)
            self._writer.run(keep, f"moments of layer {layer} written", piece.num_bytes)
            self._writer.record(freed)
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Queues the reading of the next piece, into the buffer that was let go of first.

        There are no more buffers than pieces: what is read was written before that buffer was free.
        """
        piece, (buffer, free, freed) = next(self._coming), self._ring.next()
        self._reader.wait(free, BUFFER)
        load = partial(self._file.load, piece, buffer)
        self._reader.run(load, f"moments of layer {piece.layer} read", piece.num_bytes)
        self._read.append((piece, buffer, self._reader.record(Event()), freed))

    def settle(self) -> None:
        """Returns when all that was updated is in the file."""
        written = self._writer.record(Event())
        with standing_still(DISK):
            written.synchronize(self._failure)

    def close(self, timeout_seconds: float) -> bool:
        """Ends the threads, behind what is queued unless the run has failed; False when one still runs.

        To be called when the optimizer's thread has ended.
        """
        for stream in self.streams:
            stream.close()
        return all(stream.join(timeout_seconds) for stream in self.streams)
