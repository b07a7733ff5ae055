"""A safetensors file written tensor by tensor, with its checksum: a few MiB are held in RAM."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft import files
from rpft.model.split_float import joined

_CHUNK_BYTES = 16 << 20
"""What is written and hashed at a time, and how long a save that is given up may go on."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Callable[[int, int], Sequence[torch.Tensor]]
    """What its elements from one to another lie in, flat, asked for at their turn: see ``joined``."""

    def read(self, first: int, stop: int) -> torch.Tensor:
        """Elements ``first`` to ``stop``, flat; a view where they lie whole."""
        return joined(self.stored(first, stop))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * self.num_elements


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor that are written at once."""

    entry: TensorEntry
    first: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """In the file, and of what they lie in."""
        return self.entry.dtype.itemsize * (self.stop - self.first)

    def stored(self) -> Sequence[torch.Tensor]:
        """What they lie in; see ``TensorEntry``."""
        return self.entry.stored(self.first, self.stop)


Take = Callable[[Piece], AbstractContextManager[Sequence[torch.Tensor]]]
"""Gives what a piece lies in, or copies of it, while the piece is written."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be to be whole."""

    num_bytes: int
    sha256: str


def shard_bytes(entries: Sequence[TensorEntry]) -> int:
    """Size of the file of ``entries``."""
    return len(_header(entries)) + sum(entry.num_bytes for entry in entries)


def write_shard(
    path: Path,
    entries: Sequence[TensorEntry],
    go_on: Callable[[int], None],
    take: Take = lambda piece: nullcontext(piece.stored()),
) -> FileRecord:
    """Writes ``entries``, in order, as the safetensors file ``path``; it is not yet synced.

    ``go_on`` is told of each piece's bytes, and raises to give up. ``take``: called of all ``pieces``, in order,
    one at a time.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "checksum") as hasher:
        for content in _contents(entries, take):
            hashed = hasher.submit(digest.update, content)
            try:
                files.write(file, content)
            finally:
                hashed.result()
            size += len(content)
            go_on(len(content))
    return FileRecord(size, digest.hexdigest())


def pieces(entries: Sequence[TensorEntry]) -> Iterator[Piece]:
    """What ``entries`` are written in."""
    for entry in entries:
        step = _CHUNK_BYTES // entry.dtype.itemsize
        for start in range(0, entry.num_elements, step):
            yield Piece(entry, start, min(start + step, entry.num_elements))


def _contents(entries: Sequence[TensorEntry], take: Take) -> Iterator[bytes | memoryview]:
    """The bytes of the file; what one ``yield`` gives is written when the next is asked for."""
    yield _header(entries)
    for piece in pieces(entries):
        with take(piece) as stored:
            part = joined(stored)
            assert part.dtype == piece.entry.dtype, piece.entry.name
            yield part.view(torch.uint8).numpy().data


def _header(entries: Sequence[TensorEntry]) -> bytes:
    """The format's head: length, then JSON of each tensor's dtype, shape and place, padded to 8 bytes."""
    places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        places[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_record(path: Path) -> FileRecord:
    """The size and checksum that the file ``path`` has."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_CHUNK_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return FileRecord(path.stat().st_size, digest.hexdigest())
