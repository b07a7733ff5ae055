"""How charts look: a colour and a dash for each line, light and dark, on screens and on paper."""

from __future__ import annotations

from collections.abc import Sequence

MOST_LINES = 8
"""Lines that can be told apart: each has a colour and a dash of its own."""

_LIGHT = ("#0072b2", "#c84e00", "#00805c", "#a8457f", "#7a5c00", "#4b4fb5", "#1d87b0", "#5c6670")
_DARK = ("#62bbf2", "#ff9550", "#43d3a4", "#ee9fce", "#f0d54a", "#adb0ff", "#92e2ff", "#b4bec8")
"""Okabe and Ito's hues, darker on white and lighter on black, so that each is 3:1 or more against the card."""

_DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2", "12 4", "1 3", "6 2 1 2 1 2")


def _colours(colours: Sequence[str]) -> str:
    return " ".join(f"--s{i}: {colour};" for i, colour in enumerate(colours))


STYLE = (
    ".chart text { fill: var(--soft); }\n"
    f":root {{ {_colours(_LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_colours(_DARK)} }} }}\n"
    "@media print { :root { "
    + _colours(_LIGHT)
    + " } }\n"
    + "".join(
        f".s{i} {{ stroke: var(--s{i}); fill: none;{f' stroke-dasharray: {dash};' if dash else ''} }}"
        f" .d{i} {{ fill: var(--s{i}); stroke: var(--card); }} .chart text.t{i} {{ fill: var(--s{i}); }}\n"
        for i, dash in enumerate(_DASHES)
    )
    + """.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr));
  gap: 0 1.6rem; }
figure.chart { margin: .3rem 0 .9rem; min-width: 0; break-inside: avoid; } .chart figcaption { font-weight: 600; }
.chart figcaption small { font-weight: 400; color: var(--soft); margin-left: .5rem; font-size: .85rem; }
.chart svg { display: block; width: 100%; min-width: 30rem; height: auto; font-size: 12px; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .line { stroke-width: 1.9; stroke-linejoin: round; } .chart .raw { stroke-width: 1; opacity: .38;
  stroke-dasharray: none; stroke-linejoin: round; } .chart .many { opacity: .16; }
.chart .lead { stroke: var(--line); fill: none; } .chart text.name { font-weight: 600; }
.chart .ref { stroke: var(--soft); stroke-dasharray: 3 3; } .chart .bad { fill: var(--bad); stroke: none; }
.chart .event { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 5 3; opacity: .75; }
.chart text.event { fill: var(--ink); stroke: var(--card); stroke-width: 3; paint-order: stroke; opacity: 1;
  stroke-dasharray: none; }
.chart .tip rect { fill: transparent; } .chart .tip line { stroke: none; }
.chart .tip:hover line { stroke: var(--ink); stroke-width: .8; }
.stroke { width: 2rem; height: .7rem; vertical-align: -.05rem; margin-right: .35rem; }
.stroke line { stroke-width: 2.6; }
@media print { .chart svg { min-width: 0; } .chart .tip { display: none; }
  .charts { grid-template-columns: 1fr 1fr; } }
"""
)
