"""Few rows in which every two values of different factors stand together, but for those that cannot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
Allowed = Callable[[str, str, str, str], bool]
"""(factor, value, other factor, its value) -> whether they can stand together."""

_CANDIDATES = 3
"""Rows that are drawn for each that is taken."""


def pairs_to_cover(factors: Mapping[str, Sequence[str]], allowed: Allowed) -> set[tuple[str, str, str, str]]:
    """All (factor, value, later factor, value) that can stand together."""
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed(a, x, b, y)
    }


def pairs_in(row: Row) -> set[tuple[str, str, str, str]]:
    """Those that ``row`` covers; its factors are in the order of all rows."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def covering_array(factors: Mapping[str, Sequence[str]], allowed: Allowed, seed: int) -> list[Row]:
    """Rows that cover ``pairs_to_cover``, greedily as AETG does (Cohen et al., 1997); the same for a seed.

    The first value of each factor must be allowed beside every first value of the others, and every pair that is
    allowed must be part of some row; AssertionError where one is not.
    """
    rng, left = random.Random(seed), pairs_to_cover(factors, allowed)
    rows: list[Row] = []
    while left:
        start = min(left) if not rows or rng.random() < 0.5 else rng.choice(sorted(left))
        drawn = [_drawn(factors, allowed, left, start, rng) for _ in range(_CANDIDATES)]
        found = [row for row in drawn if row is not None]
        assert found, f"no row can hold {start}"
        best = max(found, key=lambda row: len(pairs_in(row) & left))
        left -= pairs_in(best)
        rows.append(best)
    return rows


def _drawn(
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    left: set[tuple[str, str, str, str]],
    start: tuple[str, str, str, str],
    rng: random.Random,
) -> Row | None:
    """A row with the pair ``start`` whose other values cover most of ``left``; None at a dead end."""
    a, x, b, y = start
    row = {a: x, b: y}
    others = [factor for factor in factors if factor not in row]
    rng.shuffle(others)
    order = {factor: place for place, factor in enumerate(factors)}
    for factor in others:
        fit = [v for v in factors[factor] if all(allowed(f, w, factor, v) for f, w in row.items())]
        if not fit:
            return None

        def new(value: str, factor: str = factor) -> int:
            return sum(
                ((f, w, factor, value) if order[f] < order[factor] else (factor, value, f, w)) in left
                for f, w in row.items()
            )

        most = max(map(new, fit))
        row[factor] = rng.choice([value for value in fit if new(value) == most])
    return {factor: row[factor] for factor in factors}
