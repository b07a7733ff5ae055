"""Charts below one another as one SVG file that needs no other, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rpft.draw.chart import HEIGHT, WIDTH, Chart, drawing, label_width
from rpft.draw.chart_style import STYLE
from rpft.draw.page import COLOURS

_SIDE, _HEADING, _TITLE, _GAP = 16, 34, 26, 12

_OWN_STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; } .back { fill: var(--card); }
text.heading, tspan.title { font-weight: 600; fill: var(--ink); } text.heading { font-size: 15px; }
tspan.note, text.foot { fill: var(--soft); }
"""


def chart_file(heading: str, charts: Sequence[Chart], foot: Sequence[str] = ()) -> str:
    """The file's text. ``foot``: lines below the charts."""
    right = label_width(charts)
    each = _TITLE + HEIGHT + _GAP
    width, height = WIDTH + 2 * _SIDE, _HEADING + each * len(charts) + 18 * len(foot) + _SIDE
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
        f" role='img' aria-label='{escape(heading)}'>",
        f"<style>{COLOURS}{STYLE}{_OWN_STYLE}</style>",
        "<rect class='back' width='100%' height='100%'/>",
        f"<text class='heading' x='{_SIDE}' y='24'>{escape(heading)}</text>",
    ]
    for number, chart in enumerate(charts):
        drawn, top = drawing(chart, right), _HEADING + each * number
        parts += [
            f"<text x='{_SIDE}' y='{top + 16}'><tspan class='title'>{escape(chart.title)}</tspan>"
            f"<tspan class='note' dx='8'>{escape(drawn.note)}</tspan></text>",
            f"<g class='chart' transform='translate({_SIDE} {top + _TITLE})'>",
            f"<desc>{escape(drawn.in_words)}</desc>",
            *drawn.body,
            "</g>",
        ]
    below = _HEADING + each * len(charts) + 10
    parts += [
        f"<text class='foot' x='{_SIDE}' y='{below + 18 * n}'>{escape(line)}</text>" for n, line in enumerate(foot)
    ]
    return "\n".join([*parts, "</svg>\n"])
