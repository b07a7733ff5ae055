"""Line charts as SVG: lines named where they end, figures under the pointer, marks; no script, light and dark."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Literal

from rpft.draw.figures import short
from rpft.draw.scale import Point, Scale, fitting, middle_line, thinned

WIDTH, HEIGHT = 640, 236
_LEFT, _TOP, _BOTTOM = 54, 10, 36
_CHARACTER, _BOLD, _LINE = 6.5, 7.6, 13
_LONGEST_LABEL = 24
_STRIPS = 120
_ROWS_OF_EVENTS = 3
_NEAR = 1.5
"""Times the highest figure, up to which a figure to compare with still widens the axis."""


@dataclass(frozen=True)
class Line:
    """Figures by x, in the order of x."""

    name: str
    points: Sequence[Point]
    style: int = 0
    """Which colour and dash, from 0 to MOST_LINES - 1."""
    noisy: bool = False
    """Where there are many, they are drawn faintly, with their running median over them."""
    dots: bool = False
    """Each of the figures, which are few, is a dot too."""

    @cached_property
    def middle(self) -> list[Point] | None:
        """What is drawn over noise; None where there is none, or little."""
        return middle_line(self.points) if self.noisy else None


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``: a small triangle on the axis (point), or a line with a name (event)."""

    x: float
    name: str
    kind: Literal["point", "event"] = "event"


@dataclass(frozen=True)
class Chart:
    """What one picture shows."""

    title: str
    lines: Sequence[Line]
    said: Callable[[float], str]
    """A figure in words."""
    unit: str = ""
    log: bool = False
    zero: bool = False
    """Whether the axis begins at 0."""
    marks: Sequence[Mark] = ()
    references: Sequence[tuple[str, float]] = ()
    """Figures to compare with, each a thin line; (name, figure)."""
    x_name: str = "step"
    x_said: Callable[[float], str] = field(default=lambda x: f"{x:,.0f}")
    whole_x: bool = True
    """Whether x counts something: no tick is between whole numbers."""
    values_in_names: bool = True
    """Whether a line's name has its last figure beside it."""


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """As short as they can be with no two alike."""
    texts: list[str] = []
    for digits in range(2, 12):
        texts = [short(tick, digits) for tick in ticks]
        if len(set(texts)) == len(texts):
            break
    return texts


def label_width(charts: Sequence[Chart]) -> float:
    """Pixels on the right that the names of lines of all ``charts`` need, so that their axes have one length."""
    named = [_BOLD * len(_named(chart, line)) for chart in charts for line in chart.lines]
    compared = [_CHARACTER * len(name) for chart in charts for name, _ in chart.references]
    return 14 + max([*named, *compared])


def stroke_key(style: int, name: str) -> str:
    """A stroke of a line with its name, for a legend."""
    return (
        f"<svg class='stroke' viewBox='0 0 32 10' aria-hidden='true'><line class='s{style}' x1='0' x2='32' y1='5'"
        f" y2='5'/></svg>{escape(name)}"
    )


def draw(chart: Chart, right: float) -> str:
    """``chart`` as an HTML figure; ``right``: see ``label_width``."""
    drawn = drawing(chart, right)
    small = f" <small>{escape(drawn.note)}</small>" if drawn.note else ""
    return "\n".join(
        [
            f"<figure class='chart'><figcaption>{escape(chart.title)}{small}</figcaption>",
            "<div class='scroll' tabindex='-1'>",
            f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(drawn.in_words)}'>",
            *drawn.body,
            "</svg></div></figure>",
        ]
    )


@dataclass(frozen=True)
class Drawing:
    """A chart as elements of SVG, WIDTH x HEIGHT, and what stands beside its title."""

    body: list[str]
    note: str
    in_words: str


def drawing(chart: Chart, right: float) -> Drawing:
    """What ``draw`` shows; ``right``: see ``label_width``."""
    lines = [line for line in chart.lines if line.points]
    values = [y for line in lines for _, y in line.points]
    values += [value for _, value in chart.references if values and value <= _NEAR * max(values)]
    frame = _Frame(chart, lines, fitting(values, chart.log, chart.zero), right)
    beyond = [point for line in lines for point in line.points if not frame.y_scale.holds(point[1])]
    note = ", ".join(part for part in (chart.unit, "log" if chart.log else "", _beyond(chart, beyond)) if part)
    body = [
        *frame.axes(),
        *frame.references(),
        *(part for line in lines for part in frame.line(line)),
        *frame.marks(),
        *frame.outside(beyond),
        *frame.names(),
        *frame.tips(),
    ]
    return Drawing(body, note, _in_words(chart, lines))


def _named(chart: Chart, line: Line) -> str:
    name = line.name if len(line.name) <= _LONGEST_LABEL else line.name[: _LONGEST_LABEL - 1] + "…"
    if not chart.values_in_names or not line.points:
        return name
    return f"{name} {chart.said((line.middle or line.points)[-1][1])}".strip()


def _beyond(chart: Chart, beyond: Sequence[Point]) -> str:
    if not beyond:
        return ""
    furthest = max(beyond, key=lambda point: abs(point[1]))
    at = f"{chart.said(furthest[1])} at {chart.x_name} {chart.x_said(furthest[0])}"
    return f"beyond the axis: {at}" + (f" and {len(beyond) - 1} more" if len(beyond) > 1 else "")


def _in_words(chart: Chart, lines: Sequence[Line]) -> str:
    told = [
        f"{line.name or chart.title} from {chart.said(line.points[0][1])} to {chart.said(line.points[-1][1])}"
        for line in lines
    ]
    return f"{chart.title} by {chart.x_name}: {'; '.join(told) or 'nothing'}"


class _Frame:
    """Where everything of one chart stands."""

    def __init__(self, chart: Chart, lines: Sequence[Line], y_scale: Scale, right: float) -> None:
        self.chart, self.lines, self.y_scale = chart, lines, y_scale
        self.right, self.bottom = WIDTH - right, HEIGHT - _BOTTOM
        xs = [x for line in lines for x in (line.points[0][0], line.points[-1][0])]
        xs = [*xs, *(mark.x for mark in chart.marks)] or [0.0, 1.0]
        low, high = min(xs), max(xs)
        self.x_scale = Scale(low, high) if high > low else Scale(low - 0.5, high + 0.5)

    def x(self, x: float) -> float:
        return _LEFT + self.x_scale.share(x) * (self.right - _LEFT)

    def y(self, y: float) -> float:
        return self.bottom - self.y_scale.share(y) * (self.bottom - _TOP)

    def axes(self) -> list[str]:
        parts = []
        ticks = self.y_scale.ticks()
        for tick, said in zip(ticks, tick_texts(ticks), strict=True):
            y = self.y(tick)
            parts.append(f"<line class='grid' x1='{_LEFT}' x2='{self.right:.1f}' y1='{y:.1f}' y2='{y:.1f}'/>")
            parts.append(svg_text(_LEFT - 6, y + 4, said, "end"))
        ticks = self.x_scale.ticks(7)
        if self.chart.whole_x:
            ticks = [tick for tick in ticks if abs(tick - round(tick)) < 1e-9]
        for tick, said in zip(ticks, tick_texts(ticks), strict=True):
            parts.append(svg_text(self.x(tick), self.bottom + 16, said, "middle"))
        parts.append(
            f"<line class='grid' x1='{_LEFT}' x2='{self.right:.1f}' y1='{self.bottom}' y2='{self.bottom}'/>"
        )
        parts.append(svg_text((_LEFT + self.right) / 2, self.bottom + 31, self.chart.x_name, "middle"))
        return parts

    def references(self) -> list[str]:
        inside = [value for _, value in self.chart.references if self.y_scale.holds(value)]
        return [
            f"<line class='ref' x1='{_LEFT}' x2='{self.right:.1f}' y1='{self.y(value):.1f}'"
            f" y2='{self.y(value):.1f}'/>"
            for value in inside
        ]

    def line(self, line: Line) -> list[str]:
        parts = []
        noise = "raw" if len(self.lines) < 3 else "raw many"
        if line.middle is not None:
            parts.append(self._path(thinned(line.points), f"{noise} s{line.style}"))
        parts.append(self._path(line.middle or thinned(line.points), f"line s{line.style}"))
        if line.dots or len(line.points) == 1:
            parts += [
                f"<circle class='d{line.style}' cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='3.2'/>"
                for x, y in thinned(line.points, 200)
            ]
        return parts

    def _path(self, points: Sequence[Point], css_class: str) -> str:
        told = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f"<polyline class='{css_class}' points='{told}'/>"

    def marks(self) -> list[str]:
        parts, seen = [], set()
        taken = [0.0] * _ROWS_OF_EVENTS
        for mark in self.chart.marks:
            x = self.x(mark.x)
            if mark.kind == "point":
                if round(x) not in seen:
                    seen.add(round(x))
                    parts.append(
                        f"<path class='bad' d='M{x:.1f} {self.bottom - 7} l4 7 h-8 z'>"
                        f"<title>{escape(mark.name)}</title></path>"
                    )
                continue
            parts.append(f"<line class='event' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{self.bottom}'/>")
            width = _CHARACTER * len(mark.name)
            fits_right = x + 4 + width < self.right
            left = x + 4 if fits_right else x - 4 - width
            row = next((row for row, end in enumerate(taken) if left >= end), None)
            if row is not None:  # where all rows are full, the list of events has to do
                taken[row] = left + width + 6
                place, anchor = (x + 4, "start") if fits_right else (x - 4, "end")
                parts.append(svg_text(place, _TOP + 10 + _LINE * row, mark.name, anchor, "event"))
        return parts

    def outside(self, beyond: Sequence[Point]) -> list[str]:
        """Small triangles at the edge, where figures are further than it."""
        places = {(round(self.x(x)), y > self.y_scale.high) for x, y in beyond}
        return [
            f"<path class='bad' d='M{x} {_TOP - 7} l4 7 h-8 z'/>"
            if above
            else f"<path class='bad' d='M{x} {self.bottom + 7} l4 -7 h-8 z'/>"
            for x, above in sorted(places)
        ]

    def names(self) -> list[str]:
        """Names of lines beside their ends, moved apart where they would lie on one another."""
        wanted = [
            (self.y((line.middle or line.points)[-1][1]), _named(self.chart, line), line.style, line)
            for line in self.lines
        ]
        if len(self.lines) == 1 and not wanted[0][1]:
            return []
        told: list[tuple[float, str, str, float]] = [
            (y, name, f"name t{style}", self.x(line.points[-1][0])) for y, name, style, line in wanted
        ]
        for name, value in self.chart.references:
            if self.y_scale.holds(value):
                told.append((self.y(value), name, "", self.right))
        told.sort(key=lambda entry: entry[0])
        places = _apart([y for y, *_ in told], _TOP + 4, self.bottom)
        parts = []
        for (y, name, css_class, end), place in zip(told, places, strict=True):
            if abs(place - y) > 3 or end < self.right - 6:
                parts.append(
                    f"<path class='lead' d='M{end + 3:.1f} {y:.1f} L{self.right + 1:.1f} {y:.1f}"
                    f" L{self.right + 8:.1f} {place:.1f}'/>"
                )
            parts.append(svg_text(self.right + 10, place + 4, name, "start", css_class))
        return parts

    def tips(self) -> list[str]:
        """Strips over the plot that say the figures below the pointer."""
        longest = max((len(line.points) for line in self.lines), default=0)
        count = min(_STRIPS, longest)
        width = (self.right - _LEFT) / max(1, count)
        parts = []
        for i in range(count):
            share = (i + 0.5) / count
            at = self.x_scale.low + share * (self.x_scale.high - self.x_scale.low)
            told = [self._told(line, at) for line in self.lines]
            x = _LEFT + i * width
            middle = x + width / 2
            parts.append(
                f"<g class='tip'><rect x='{x:.1f}' y='{_TOP}' width='{width:.1f}' height='{self.bottom - _TOP}'/>"
                f"<line x1='{middle:.1f}' x2='{middle:.1f}' y1='{_TOP}' y2='{self.bottom}'/>"
                f"<title>{escape(chr(10).join(told))}</title></g>"
            )
        return parts

    def _told(self, line: Line, at: float) -> str:
        place = bisect.bisect_left(line.points, (at,))
        near = line.points[max(0, place - 1) : place + 1]
        x, y = min(near, key=lambda point: abs(point[0] - at))
        return (
            f"{line.name or self.chart.title}: {self.chart.said(y)} at {self.chart.x_name} {self.chart.x_said(x)}"
        )


def _apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """The places nearest to ``wanted``, which ascend, that are a line of text apart."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + _LINE) if places else max(y, low))
    limit = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - _LINE
    return places


def svg_text(x: float, y: float, content: str, anchor: str, css_class: str = "") -> str:
    named = f" class='{css_class}'" if css_class else ""
    side = "" if anchor == "start" else f" text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}'{side}{named}>{escape(content)}</text>"
