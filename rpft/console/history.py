"""A number's way through a run in one line of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"


class History:
    """The values of a run, however long it is: beyond so many, neighbours are averaged."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._means: list[float] = []
        self._size = 1
        """Values in each of the means."""
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Notes ``value``; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        # Nothing is changed in place: another thread may be reading.
        self._open = [*self._open, value]
        if len(self._open) == self._size:
            self._means = [*self._means, sum(self._open) / self._size]
            self._open = []
        if len(self._means) == self._most:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._size *= 2

    @property
    def values(self) -> list[float]:
        """In order; the last may be of fewer values than the others."""
        means, rest = self._means, self._open
        return [*means, *([sum(rest) / len(rest)] if rest else [])]


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """At most ``width`` characters, from the lowest value's to the highest's; "" of no values."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if ascii_only else _BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)
