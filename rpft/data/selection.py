"""Which rows of the data a run trains on and evaluates on: weights, held-out rows, duplicates across both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rpft.data.rows import Row, keys_of


def hold_out(num_rows: int, num_held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices of training rows, indices of evaluation rows), each ascending, by a draw from ``seed``."""
    assert 0 < num_held_out < num_rows
    drawn = np.argsort(_words(num_rows, seed, 0), kind="stable")
    held_out = np.zeros(num_rows, dtype=bool)
    held_out[drawn[:num_held_out]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def weigh(source_of: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """Indices of the rows that an epoch takes, ascending.

    ``source_of`` is the number of each row's source. A row stands as often as the whole part of its source's
    weight says; of the fraction that is left, so large a share of the source's rows stands once more, drawn from
    ``seed``, the same in every epoch. At least one row of a source stands.
    """
    times = np.zeros(len(source_of), dtype=np.int64)
    for number, weight in enumerate(weights):
        rows = np.flatnonzero(source_of == number)
        if not len(rows):
            continue
        times[rows] = int(weight)
        extra = round((weight - int(weight)) * len(rows))
        if weight < 1:
            extra = max(1, extra)
        if extra:
            drawn = np.argsort(_words(len(rows), seed, number + 1), kind="stable")
            times[rows[drawn[:extra]]] += 1
    return np.repeat(np.arange(len(source_of)), times)


def count_shared(train: Sequence[Row], held_out: Sequence[Row]) -> int:
    """Rows of ``held_out`` whose tokens are also those of a row of ``train``."""
    train_keys, keys = keys_of(train), keys_of(held_out)
    candidates = np.flatnonzero(np.isin(keys, train_keys))
    if not len(candidates):
        return 0
    known = {train[int(i)].ids.tobytes() for i in np.flatnonzero(np.isin(train_keys, keys[candidates]))}
    return sum(held_out[int(i)].ids.tobytes() in known for i in candidates)


def count_repeated(rows: Sequence[Row]) -> int:
    """Rows whose tokens are those of an earlier row."""
    keys = keys_of(rows)
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    suspects = np.flatnonzero(counts[inverse] > 1)
    return len(suspects) - len({rows[int(i)].ids.tobytes() for i in suspects})


def _words(count: int, seed: int, stream: int) -> np.ndarray:
    # Raw words of Philox, whose values do not change with numpy's version.
    return np.random.Philox(key=np.array([seed % 2**64, stream], dtype=np.uint64)).random_raw(count)
