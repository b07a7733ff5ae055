"""A step that was traced as rows of characters: which kind of work filled each stretch of time."""

from __future__ import annotations

from rpft.train.watched import SeenStep

LETTERS = {"forward": "F", "fused": "L", "backward": "B", "loss": "E", "optimizer": "U", "compute": "?"}
"""Kind of work to what stands for it, so that it is told without colours too."""

NAMES = {
    "forward": "forward",
    "fused": "loss",
    "backward": "backward",
    "loss": "evaluation",
    "optimizer": "update",
}
IDLE = "."

_LEAST = {"optimizer": 0.1}
"""Share of a stretch that must be filled: half, but updates may be short and should be seen."""


def cells(seen: SeenStep, width: int) -> list[tuple[str, list[str]]]:
    """(row's name, kind of work in each of ``width`` stretches, "" where most of it was idle), row by row."""
    return [(name, _row(blocks, width, _LEAST.get(name, 0.5))) for name, blocks in seen.rows]


def _row(blocks: list[tuple[str, float, float]], width: int, least: float) -> list[str]:
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for kind, first, last in blocks:
        start, end = first * width, last * width
        for cell in range(int(start), min(width, int(end) + 1)):
            share = min(end, cell + 1) - max(start, cell)
            filled[cell][kind] = filled[cell].get(kind, 0.0) + share
    row = []
    for kinds in filled:
        kind = max(kinds, key=lambda name: kinds[name], default="")
        row.append(kind if sum(kinds.values()) >= least else "")
    return row
