"""Every plan of a small model, to hold a search against."""

from __future__ import annotations

from collections.abc import Iterator

from rpft.plan.plan import Plan, Stage


def partitions(layers: int) -> list[tuple[Stage, ...]]:
    """All ways to cut so many layers into stages."""
    if layers == 0:
        return [()]
    return [(*some, Stage(cut, layers - 1)) for cut in range(layers) for some in partitions(cut)]


def every_plan(num_layers: int, m: int, recompute: str) -> Iterator[Plan]:
    """All plans with so many microbatches a round."""
    head = num_layers - 1
    for first in range(1, head + 1):
        below = partitions(first)
        yield from (
            Plan(up, (Stage(first, head), *reversed(down)), m, recompute) for up in below for down in below
        )
