"""A figure of many rows over time as a field of colours in SVG: log scale, figures at the pointer, no script."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from rpft.draw.chart import svg_text
from rpft.draw.figures import short

COLOURS = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c",
    "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
"""Viridis (van der Walt and Smith, 2015), lowest first: even steps, also for the colour-blind and in print."""

_WIDTH, _LEFT, _RIGHT, _TOP = 640, 78, 14, 10
_MOST_COLUMNS = 120
_HEIGHT, _LOWEST_ROW, _HIGHEST_ROW = 190, 3.0, 26.0
_LABEL_HEIGHT = 13
_KEY_HEIGHT = 9


@dataclass(frozen=True)
class Heatmap:
    """What one picture shows. Figures are above 0; None: there is none."""

    title: str
    rows: Sequence[str]
    """Names, the first at the bottom."""
    columns: Sequence[tuple[int, Sequence[float | None]]]
    """(x, a figure a row), in the order of x."""
    unit: str = ""
    x_name: str = "step"

    def limits(self) -> tuple[float, float] | None:
        """The lowest and the highest figure that is drawn; None where there is none."""
        drawn = [value for _, values in self._binned() for value in values if value]
        return (min(drawn), max(drawn)) if drawn else None

    def _binned(self) -> list[tuple[int, list[float | None]]]:
        """At most _MOST_COLUMNS columns: medians of neighbours, each beginning at its first x."""
        count = len(self.columns)
        bins = min(_MOST_COLUMNS, count)
        edges = [i * count // bins for i in range(bins + 1)] if bins else [0]
        found = []
        for first, end in pairwise(edges):
            part = self.columns[first:end]
            by_row = ([values[row] for _, values in part] for row in range(len(self.rows)))
            medians = [_median(values) for values in by_row]
            found.append((part[0][0], medians))
        return found

    def draw(self, limits: tuple[float, float] | None = None) -> str:
        """As an HTML figure. ``limits``: of the colours, where several pictures share them."""
        own = self.limits()
        if own is None:
            return ""
        return "\n".join(_Picture(self, self._binned(), limits or own).parts())


class _Picture:
    """Where everything of one heatmap stands."""

    def __init__(self, heat: Heatmap, columns: list[tuple[int, list[float | None]]], limits: tuple[float, float]):
        self.heat, self.columns, self.limits = heat, columns, limits
        self.row = max(_LOWEST_ROW, min(_HIGHEST_ROW, _HEIGHT / len(heat.rows)))
        self.bottom = _TOP + self.row * len(heat.rows)
        self.column = (_WIDTH - _LEFT - _RIGHT) / len(columns)

    def parts(self) -> list[str]:
        heat, (low, high) = self.heat, self.limits
        note = ", ".join(part for part in (heat.unit, "log") if part)
        said = f"{heat.title} by {heat.x_name}, {len(heat.rows)} rows: from {short(low)} to {short(high)}"
        height = self.bottom + 62
        return [
            f"<figure class='chart'><figcaption>{escape(heat.title)} <small>{escape(note)}</small></figcaption>",
            "<div class='scroll' tabindex='-1'>",
            f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' role='img' aria-label='{escape(said)}'>",
            *self._cells(),
            *self._names(),
            *self._steps(),
            *self._key(),
            *self._tips(),
            "</svg></div></figure>",
        ]

    def _y(self, row: int) -> float:
        return self.bottom - (row + 1) * self.row

    def _cells(self) -> list[str]:
        """One path a colour, in which neighbours of a row are one stroke: a picture of 80 layers stays small."""
        paths: dict[str, list[str]] = {}
        for row in range(len(self.heat.rows)):
            fills = [self._fill(value) if (value := values[row]) else None for _, values in self.columns]
            first = 0
            for fill, run in groupby(fills):
                length = len(list(run))
                if fill is not None:
                    # A hair's breadth more, or the background shines through between cells.
                    width, height = length * self.column + 0.3, self.row + 0.3
                    at = f"M{_LEFT + first * self.column:.1f} {self._y(row):.1f}"
                    paths.setdefault(fill, []).append(f"{at}h{width:.1f}v{height:.1f}h-{width:.1f}z")
                first += length
        return [f"<path fill='{fill}' d='{''.join(cells)}'/>" for fill, cells in paths.items()]

    def _fill(self, value: float) -> str:
        low, high = (math.log(limit) for limit in self.limits)
        share = (math.log(value) - low) / (high - low) if high > low else 0.5
        return COLOURS[round(max(0.0, min(1.0, share)) * (len(COLOURS) - 1))]

    def _names(self) -> list[str]:
        """As many rows as there is room for are named, the first and the last among them."""
        count = len(self.heat.rows)
        every = max(1, math.ceil(_LABEL_HEIGHT / self.row))
        named = {0, count - 1, *range(every, count - every, every)}
        return [svg_text(_LEFT - 6, self._y(row) + self.row / 2 + 4, self.heat.rows[row], "end") for row in named]

    def _steps(self) -> list[str]:
        count = len(self.columns)
        shown = sorted({round(i * (count - 1) / 6) for i in range(7)})
        ticks = [
            svg_text(_LEFT + (c + 0.5) * self.column, self.bottom + 16, f"{self.columns[c][0]:,}", "middle")
            for c in shown
        ]
        return [*ticks, svg_text((_LEFT + _WIDTH - _RIGHT) / 2, self.bottom + 31, self.heat.x_name, "middle")]

    def _key(self) -> list[str]:
        """What the colours mean."""
        width, top = 18, self.bottom + 44
        left = (_LEFT + _WIDTH - _RIGHT - width * len(COLOURS)) / 2
        low, high = self.limits
        swatches = [
            f"<rect x='{left + i * width:.1f}' y='{top:.1f}' width='{width + 0.3}' height='{_KEY_HEIGHT}'"
            f" fill='{fill}'/>"
            for i, fill in enumerate(COLOURS)
        ]
        ends = (left - 6, short(low, 3), "end"), (left + width * len(COLOURS) + 6, short(high, 3), "start")
        return [*swatches, *(svg_text(x, top + _KEY_HEIGHT, said, anchor) for x, said, anchor in ends)]

    def _tips(self) -> list[str]:
        """A row's figures under the pointer."""
        parts = []
        for row, name in enumerate(self.heat.rows):
            known = [(x, values[row]) for x, values in self.heat.columns if values[row]]
            if known:
                figures = [value for _, value in known if value]
                at, most = max(known, key=lambda entry: entry[1] or 0.0)
                said = (
                    f"{name}: first {short(figures[0])}, median {short(statistics.median(figures))}, last"
                    f" {short(figures[-1])}; highest {short(most or 0.0)} at {self.heat.x_name} {at:,}"
                )
            else:
                said = f"{name}: none"
            parts.append(
                f"<g class='tip'><title>{escape(said)}</title><rect x='{_LEFT}' y='{self._y(row):.1f}'"
                f" width='{_WIDTH - _LEFT - _RIGHT}' height='{self.row:.1f}'/></g>"
            )
        return parts


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.median(known) if known else None
