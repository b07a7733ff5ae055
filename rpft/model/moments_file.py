"""The moments of all layers in a file on the disk, in pieces of few enough parameters for several to be in RAM.

    file     | layer 0, piece 0 | layer 0, piece 1 | layer 1, piece 0 | ...    each from the start of a block on
    piece    as the moments of a layer lie in RAM (model/moments.py), of its own parameters alone

An update reads a piece, changes it and writes it back; the window is the host buffers in which that happens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rpft.errors import UserError
from rpft.model.layout import LayerLayout, align
from rpft.model.moments import BLOCK, Moments, StateFormat, moments_bytes, moments_in, stored_block
from rpft.model.pages import zeroed_pages
from rpft.model.scratch_file import BLOCK_BYTES, ScratchFile

logger = logging.getLogger(__name__)

PIECE_PARAMETERS = 1 << 24
"""Of a piece at most, 128 MiB in float32: a disk is at its full rate, and a window is small beside a model."""

WINDOW_PIECES = 4
"""Host buffers: one is read into, one is updated, one is written back, and one lets each go on meanwhile."""

assert PIECE_PARAMETERS % BLOCK == 0


@dataclass(frozen=True)
class Piece:
    """Parameters ``start`` to ``stop`` of the trained ones of ``layer``, at ``offset`` of the file."""

    layer: int
    start: int
    stop: int
    offset: int
    state_bytes: int
    """Of the moments."""

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        """In the file, to the next block."""
        return align(self.state_bytes, BLOCK_BYTES)


def moments_pieces(layouts: Sequence[LayerLayout], state_format: StateFormat) -> list[Piece]:
    """All pieces, in the order of the file, layer by layer."""
    pieces, offset = [], 0
    for layout in layouts:
        for start in range(0, layout.num_trained, PIECE_PARAMETERS):
            stop = min(start + PIECE_PARAMETERS, layout.num_trained)
            piece = Piece(layout.layer, start, stop, offset, moments_bytes(state_format, stop - start))
            pieces.append(piece)
            offset += piece.num_bytes
    return pieces


def moments_file_bytes(pieces: Sequence[Piece]) -> int:
    """Of the file, exactly."""
    return sum(piece.num_bytes for piece in pieces)


def window_bytes(pieces: Sequence[Piece]) -> int:
    """Host bytes of the window, exactly."""
    return min(WINDOW_PIECES, len(pieces)) * max(piece.num_bytes for piece in pieces)


class MomentsFile:
    """The file and its window. Threads that read and write one piece at a time are for the caller to order."""

    def __init__(self, folder: Path, layouts: Sequence[LayerLayout], state_format: StateFormat) -> None:
        """All zeros. UserError where ``folder`` cannot be written, or its disk has no room."""
        self._format: StateFormat = state_format
        self.pieces = moments_pieces(layouts, state_format)
        self._of_layer: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            self._of_layer.setdefault(piece.layer, []).append(piece)
        self.num_bytes = moments_file_bytes(self.pieces)
        try:
            self._file = ScratchFile(folder, self.num_bytes)
        except OSError as error:
            raise UserError(
                f"optimizer.offload {folder}: the moments need a file of {self.num_bytes:,} bytes there"
                f" ({error.strerror}). Make room, name a folder of another disk, or leave optimizer.offload out"
            ) from error
        if not self._file.direct:
            logger.warning(
                "optimizer.offload %s: its file system has no direct reads and writes; they go through the"
                " system's cache, which is emptied behind them, and are slower",
                folder,
            )
        longest = max(piece.num_bytes for piece in self.pieces)
        self.window = [zeroed_pages(longest) for _ in range(min(WINDOW_PIECES, len(self.pieces)))]

    def of_layer(self, layer: int) -> list[Piece]:
        """The pieces of ``layer``, in order."""
        return self._of_layer.get(layer, [])

    def moments_in(self, piece: Piece, buffer: Tensor) -> Moments:
        """The moments of ``piece`` that lie in ``buffer``, one of ``window``."""
        moments = moments_in(buffer[: piece.state_bytes], self._format, piece.stop - piece.start)
        return replace(moments, first_place=piece.start)

    def load(self, piece: Piece, buffer: Tensor) -> None:
        """Reads ``piece`` into ``buffer``, one of ``window``; OSError where the disk does not give it."""
        self._file.read_blocks(piece.offset, buffer[: piece.num_bytes])

    def keep(self, piece: Piece, buffer: Tensor) -> None:
        """Writes ``piece`` from ``buffer``, one of ``window``; OSError where the disk does not take it."""
        self._file.write_blocks(piece.offset, buffer[: piece.num_bytes])

    def read(self, layer: int, kind: str, first: int, stop: int) -> Tensor:
        """Elements ``first`` to ``stop`` of the field ``kind`` of a layer's moments, flat, in new memory."""
        found = []
        for offset, start, end, dtype in self._runs(layer, kind, first, stop):
            found.append(self._file.read(offset, offset + (end - start) * dtype.itemsize).view(dtype))
        return found[0] if len(found) == 1 else torch.cat(found)

    def write(self, layer: int, kind: str, first: int, values: Tensor) -> None:
        """Writes ``values``, flat, as elements of the field ``kind`` of a layer's moments, from ``first`` on."""
        for offset, start, end, dtype in self._runs(layer, kind, first, first + len(values)):
            assert values.dtype == dtype, kind
            self._file.write(offset, values[start - first : end - first].contiguous().view(torch.uint8))

    def _runs(self, layer: int, kind: str, first: int, stop: int) -> Iterator[tuple[int, int, int, torch.dtype]]:
        """(offset in the file, first element, end, dtype) of each run of elements that lies in one piece."""
        block = stored_block(self._format, kind)
        for piece in self.of_layer(layer):
            start, end = max(first, piece.start // block), min(stop, -(-piece.stop // block))
            if start >= end:
                continue
            place = torch.empty(piece.state_bytes, dtype=torch.uint8, device="meta")
            field: Tensor = getattr(moments_in(place, self._format, piece.stop - piece.start), kind)
            at = int(field.storage_offset()) + start - piece.start // block
            yield piece.offset + at * field.dtype.itemsize, start, end, field.dtype

    def close(self) -> None:
        """Gives the file's bytes back to the disk."""
        self._file.close()
