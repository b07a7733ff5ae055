"""A timeline as SVG: lanes of coloured blocks over an axis of seconds; one drawing for every source of blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from rpft.draw.colours import INK, KINDS, NAMES, ink_on

BAR = 14
"""Height of a bar in pixels, where a lane says nothing else."""

MOST_BLOCKS = 3000
"""Blocks of a picture: at some 80 bytes each they stay under 250 KB."""

CHARACTER = 6.2
"""Width of a character of a label, in pixels."""

LABEL_WIDTHS = (600, 800, 1000, 1300, 1700, 2300, 3200, 4500, 6400, 9000)
"""Widths of a picture that stretches, from which on labels of a class of their own are shown."""

_NEARLY_BUSY, _LEAST_SEEN = 0.9, 0.4
"""Share of work from which on a block looks as if all of it were; share that a paler one looks like at least."""

_MOST_TICKS = 14

Nature = Literal["solid", "pale", "wait"]


@dataclass
class Block:
    """Some work of one kind. Blocks of a group are of one piece of work, which has a name."""

    kind: str
    start_seconds: float
    end_seconds: float
    nature: Nature = "solid"
    group: str = ""
    fill: str = ""
    """Where it is not the colour of the kind."""
    faint: bool = False
    """Not of what the picture is about, such as the step before."""
    busy_seconds: float | None = None
    """How much of it is work, where it stands for several pieces; None: all of it."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    @property
    def busy(self) -> float:
        """Share of it that is work."""
        return 1.0 if self.busy_seconds is None or not self.seconds else self.busy_seconds / self.seconds


@dataclass(frozen=True)
class Named:
    """A stretch of a lane that has a name, and more to say of it to a pointer."""

    start_seconds: float
    end_seconds: float
    name: str
    fill: str
    """What the name stands on."""
    title: str = ""
    faint: bool = False


@dataclass
class Lane:
    """One row of blocks."""

    blocks: list[Block]
    named: list[Named] = field(default_factory=list)


@dataclass(frozen=True)
class Ruler:
    """Where times stand: in pixels, or in hundredths of whatever width the picture gets."""

    start_seconds: float
    end_seconds: float
    left: float = 0.0
    pixels: float | None = None
    """Width of the plot; None where it stretches."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    def x(self, at_seconds: float) -> str:
        """A coordinate."""
        share = (at_seconds - self.start_seconds) / self.seconds
        return f"{share:.3%}" if self.pixels is None else f"{self.left + share * self.pixels:.1f}"

    def width(self, start_seconds: float, end_seconds: float) -> str:
        """A width, never too small to be seen."""
        share = (end_seconds - start_seconds) / self.seconds
        return f"{max(share, 3e-4):.3%}" if self.pixels is None else f"{max(share * self.pixels, 0.4):.1f}"

    def label_class(self, start_seconds: float, end_seconds: float, name: str) -> str | None:
        """The class of a label, which says how wide the picture must be for it; None where it never fits."""
        share, needed = (end_seconds - start_seconds) / self.seconds, CHARACTER * max(2, len(name)) + 4
        if self.pixels is not None:
            return "" if share * self.pixels > needed else None
        fitting = (width for width in LABEL_WIDTHS if share * width > needed)
        return next((f"w{width}" for width in fitting), None)


def fitted(
    lanes: Sequence[Sequence[Block]], window_seconds: float, pixels: float, most: int = MOST_BLOCKS
) -> tuple[list[list[Block]], float]:
    """The blocks of each lane, joined until there are ``most``; and the longest gap that was closed, in seconds.

    Blocks of one kind, group and nature that nearly touch become one, which is paler where gaps that were
    closed are much of it; groups are given up first.
    """
    gap_seconds, by_group = 0.5 * window_seconds / pixels, True
    while True:
        joined = [_joined(blocks, gap_seconds, by_group) for blocks in lanes]
        if sum(map(len, joined)) <= most:
            return joined, gap_seconds
        if by_group:
            by_group = False
        else:
            gap_seconds *= 2


def _joined(blocks: Sequence[Block], gap_seconds: float, by_group: bool) -> list[Block]:
    last: dict[tuple[object, ...], Block] = {}
    kept = []
    for block in sorted(blocks, key=lambda b: b.start_seconds):
        group = block.group if by_group else ""
        key = (block.nature, block.kind, group, block.fill, block.faint)
        before = last.get(key)
        if before is not None and block.start_seconds - before.end_seconds <= gap_seconds:
            assert before.busy_seconds is not None
            before.end_seconds = max(before.end_seconds, block.end_seconds)
            before.busy_seconds = min(before.seconds, before.busy_seconds + block.busy * block.seconds)
            continue
        last[key] = replace(block, group=group, busy_seconds=block.busy * block.seconds)
        kept.append(last[key])
    return kept


def bars(lane: Lane, ruler: Ruler, y: float, height: int = BAR) -> list[str]:
    """The SVG elements of one lane whose upper edge is at ``y``."""
    parts = [_bar(block, ruler, y, height) for block in lane.blocks]
    for named in lane.named:
        place = f'x="{ruler.x(named.start_seconds)}" width="{ruler.width(named.start_seconds, named.end_seconds)}"'
        if named.title:
            parts.append(
                f'<rect class="slot" {place} y="{y:g}" height="{height}">'
                f"<title>{escape(named.title)}</title></rect>"
            )
        shown = ruler.label_class(named.start_seconds, named.end_seconds, named.name)
        if shown is not None and not named.faint:
            middle = ruler.x((named.start_seconds + named.end_seconds) / 2)
            baseline = y + height / 2 + 4
            ink = ink_on(named.fill)
            parts.append(text(middle, baseline, named.name, "middle", ink, css_class=shown, behind=named.fill))
    return parts


def _bar(block: Block, ruler: Ruler, y: float, height: int) -> str:
    x, width = ruler.x(block.start_seconds), ruler.width(block.start_seconds, block.end_seconds)
    if block.nature == "wait":
        return f'<rect x="{x}" y="{y + height / 2 - 1:g}" width="{width}" height="2" fill="{INK}" opacity=".4"/>'
    opacity = 0.3 if block.nature == "pale" or block.faint else 1.0
    if block.busy < _NEARLY_BUSY:
        opacity *= max(block.busy, _LEAST_SEEN)
    seen = "" if opacity == 1.0 else f' opacity="{opacity:.2g}"'.replace('"0.', '".')
    fill = block.fill or KINDS[block.kind]
    return f'<rect x="{x}" y="{y:g}" width="{width}" height="{height}" fill="{fill}"{seen}/>'


def text(
    x: str | float,
    y: float,
    content: str,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "normal",
    css_class: str = "",
    behind: str = "",
) -> str:
    """An SVG text whose baseline is at ``y``; ``behind``: a colour around it, where what it stands on has gaps."""
    place = x if isinstance(x, str) else f"{x:.1f}"
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    more += "" if weight == "normal" else f' font-weight="{weight}"'
    more += f" class={quoteattr(css_class)}" if css_class else ""
    more += f' stroke="{behind}" stroke-width="3" paint-order="stroke"' if behind else ""
    return f'<text x="{place}" y="{y:.1f}" fill="{fill}"{more}>{escape(content)}</text>'


def legend(kinds: Collection[str], waits: bool, left: float) -> list[str]:
    """One swatch for each of ``kinds``, in a line at the top."""
    parts, x = [], left
    for kind in [kind for kind in KINDS if kind in kinds]:
        name = NAMES.get(kind, kind)
        parts.append(f'<rect x="{x:.1f}" y="8" width="12" height="12" fill="{KINDS[kind]}"/>')
        parts.append(text(x + 16, 18, name))
        x += 34 + 6.0 * len(name)
    if waits:
        parts.append(f'<rect x="{x:.1f}" y="13" width="12" height="2" fill="{INK}"/>')
        parts.append(text(x + 16, 18, "waits"))
    return parts


def axis(ruler: Ruler, zero_seconds: float, top: float, bottom: float) -> list[str]:
    """About ten ticks at round numbers of ms or s since ``zero_seconds``, with lines through all lanes."""
    unit, scale = ("ms", 1e3) if ruler.seconds < 20 else ("s", 1.0)
    rough = ruler.seconds * scale / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil((ruler.start_seconds - zero_seconds) * scale / step - 1e-9)
    last = math.floor((ruler.end_seconds - zero_seconds) * scale / step + 1e-9)
    parts = []
    for i in range(first, last + 1):
        x = ruler.x(zero_seconds + i * step / scale)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}" stroke="{INK}" stroke-opacity=".3"/>')
        parts.append(text(x, bottom + 14, f"{i * step:g}" + (f" {unit}" if i == 0 else ""), "middle"))
    return parts
