"""Token rows kept flat, in memory or in mapped files: millions of rows are a few arrays."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np

_FILES = {"ids": np.int32, "trained": np.bool_, "lengths": np.int32, "ordinals": np.int64, "keys": np.uint64}


@dataclass(frozen=True, eq=False)
class Row:
    """The token ids of one row and which of them are trained.

    ids: int32 [length]; trained: bool [length]. ``trained[0]`` is always false: nothing stands before the
    first token from which it could be predicted, so ``trained.sum()`` is the number of labels of the row.
    """

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True, eq=False)
class Block:
    """Rows one after another.

    ids: int32, trained: bool [tokens]; lengths: int32, ordinals: int64, keys: uint64 [rows]. An ordinal is a row's
    number in its source, from 0, dropped rows counted. A key is equal for equal tokens, and seldom for others.
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    ordinals: np.ndarray
    keys: np.ndarray

    @staticmethod
    def of(rows: Sequence[Row], ordinals: Sequence[int]) -> Block:
        """``rows`` as one block."""
        ids = np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, np.int32)
        lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
        return Block(
            ids,
            np.concatenate([row.trained for row in rows]) if rows else np.zeros(0, np.bool_),
            lengths,
            np.array(ordinals, dtype=np.int64),
            _row_sums(_hashes(ids), lengths),
        )

    @staticmethod
    def joined(blocks: Sequence[Block]) -> Block:
        """All rows of several blocks, in their order."""
        if not blocks:
            return Block.of([], [])
        return Block(*(np.concatenate([getattr(block, name) for block in blocks]) for name in _FILES))


class BlockWriter:
    """Appends blocks to the files of a folder, so that no more than one block is in memory."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, BinaryIO] = {name: (folder / f"{name}.bin").open("wb") for name in _FILES}

    def append(self, block: Block) -> None:
        for name, file in self._files.items():
            np.ascontiguousarray(getattr(block, name)).tofile(file)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def map_block(folder: Path) -> Block:
    """The block that a BlockWriter left, mapped: pages are read when needed. OSError, ValueError: broken."""
    arrays = {}
    for name, dtype in _FILES.items():
        path = folder / f"{name}.bin"
        # An empty file cannot be mapped.
        arrays[name] = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
    block = Block(**arrays)
    tokens = int(block.lengths.sum(dtype=np.int64))
    whole_rows = len(block.lengths) == len(block.ordinals) == len(block.keys)
    if not (whole_rows and tokens == len(block.ids) == len(block.trained)):
        raise ValueError(f"{folder}: the files do not belong together")
    return block


class _FlatRows(Sequence[Row]):
    """Rows that are made when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        return self._row(index)

    @abstractmethod
    def _row(self, index: int) -> Row: ...

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [rows]."""

    @property
    @abstractmethod
    def keys(self) -> np.ndarray:
        """The key of each row, uint64 [rows]."""


class Rows(_FlatRows):
    """The rows of several blocks as one sequence, each a view."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = list(blocks)
        self._starts = [0]
        for block in self.blocks:
            self._starts.append(self._starts[-1] + len(block.lengths))
        self._ends = [np.cumsum(block.lengths, dtype=np.int64) for block in self.blocks]

    def __len__(self) -> int:
        return self._starts[-1]

    def _row(self, index: int) -> Row:
        block, place = self._find(index)
        ends = self._ends[block]
        start, end = int(ends[place - 1]) if place else 0, int(ends[place])
        found = self.blocks[block]
        return Row(np.asarray(found.ids[start:end]), np.asarray(found.trained[start:end]))

    def origin(self, index: int) -> tuple[int, int]:
        """(number of the block, ordinal in its source) of a row."""
        block, place = self._find(index)
        return block, int(self.blocks[block].ordinals[place])

    def _find(self, index: int) -> tuple[int, int]:
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        block = bisect.bisect_right(self._starts, index) - 1
        return block, index - self._starts[block]

    @property
    def lengths(self) -> np.ndarray:
        parts = [block.lengths for block in self.blocks]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def keys(self) -> np.ndarray:
        parts = [block.keys for block in self.blocks]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


class ChosenRows(_FlatRows):
    """Some rows of a sequence, by their indices, in that order."""

    def __init__(self, rows: Sequence[Row], indices: np.ndarray) -> None:
        self._rows = rows
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def _row(self, index: int) -> Row:
        return self._rows[int(self.indices[index])]

    @property
    def lengths(self) -> np.ndarray:
        return lengths_of(self._rows)[self.indices]

    @property
    def keys(self) -> np.ndarray:
        return keys_of(self._rows)[self.indices]


def lengths_of(rows: Sequence[Row]) -> np.ndarray:
    """Tokens of each row, int32 [rows]."""
    if isinstance(rows, _FlatRows):
        return rows.lengths
    return np.array([len(row.ids) for row in rows], dtype=np.int32)


def keys_of(rows: Sequence[Row]) -> np.ndarray:
    """The key of each row, uint64 [rows]: see Block."""
    if isinstance(rows, _FlatRows):
        return rows.keys
    return Block.of(rows, range(len(rows))).keys


def _hashes(ids: np.ndarray) -> np.ndarray:
    """The mixing of splitmix64 (Steele et al., 2014): sums of plain ids would often be equal."""
    hashes = ids.astype(np.uint64)
    hashes += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    return hashes


def _row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The sum of each row's values; every row has at least one token."""
    if not len(lengths):
        return np.zeros(0, values.dtype)
    return np.add.reduceat(values, np.cumsum(lengths, dtype=np.int64) - lengths)
