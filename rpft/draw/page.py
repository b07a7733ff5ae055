"""HTML pages that need no other file: their style on screens, light or dark, and on paper; tiles, bars, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rpft.draw.timeline import LABEL_WIDTHS

PARTS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7", "#5c6670", "#8f7fd6")
"""Fills of the parts of a whole, in order: the colour-blind can tell neighbours apart."""

COLOURS = """
:root { color-scheme: light dark; --bg: #f6f7f8; --card: #fff; --ink: #1c2126; --soft: #57606a; --line: #d5dae0;
  --idle: #e7ebef; --good: #0a6b3d; --bad: #b3261e; --hatch: #0006; }
@media (prefers-color-scheme: dark) { :root { --bg: #121518; --card: #1b1f24; --ink: #e6e9ec; --soft: #a5afba;
  --line: #383f47; --idle: #2b3138; --good: #5fd39a; --bad: #ff9a90; --hatch: #fff7; } }
"""
"""What all that is drawn takes its colours from, light and dark."""

_STYLE = (
    COLOURS
    + """* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--bg);
  margin: 0 auto; padding: 1.2rem 1.2rem 3rem; max-width: 84rem; }
h1, h2, h3 { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; } p { margin: .3rem 0; max-width: 70rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
  .verdict { font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem 1.1rem;
  margin: 1rem 0; }
section h3::first-letter { text-transform: uppercase; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem;
  margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; } .tile span { color: var(--soft);
  font-size: .87rem; }
.key { display: inline-block; width: .85rem; height: .85rem; border-radius: 2px; vertical-align: -.1rem;
  margin-right: .35rem; }
ul.keys { list-style: none; margin: .4rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .15rem 1.2rem;
  font-size: .9rem; }
.whole { position: relative; height: 1.7rem; margin: .3rem 0 1.35rem; background: var(--idle);
  border-radius: 3px; }
.whole > i { position: absolute; top: 0; bottom: 0; border-right: 1px solid var(--card); }
.whole > .over { background: repeating-linear-gradient(45deg, var(--bad) 0 3px, transparent 3px 8px);
  border: 2px solid var(--bad); }
.whole > .limit { border-right: 2px solid var(--ink); top: -4px; bottom: -4px; width: 0; }
.whole > small { position: absolute; top: 100%; color: var(--soft); white-space: nowrap; font-size: .82rem; }
.bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content; gap: .3rem .7rem;
  align-items: center; }
.bars > i { height: .95rem; background: var(--idle); border-radius: 2px; overflow: hidden; }
.bars > i > i { display: block; height: 100%; } .bars > .shares { position: relative; }
.bars > .shares > i { position: absolute; top: 0; bottom: 0; border-right: 1px solid var(--card); }
.bars > span { font-size: .9rem; }
img.trace { display: block; width: 100%; min-width: 62rem; height: auto; }
.scroll { overflow: auto; } .scroll:focus-visible { outline: 2px solid #56b4e9; }
.tall { max-height: 34rem; }
table { border-collapse: collapse; font-size: .9rem; } th { font-weight: 600; color: var(--soft); }
td, th { padding: .16rem .9rem .16rem 0; text-align: left; vertical-align: middle; white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--card); border-bottom: 1px solid var(--line);
  vertical-align: bottom; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.most { font-weight: 600; }
table.loose td { white-space: normal; } table.loose td.n { white-space: nowrap; }
td .meter { width: 9rem; height: .45rem; background: var(--idle); display: block; }
td .meter + .meter { margin-top: 1px; height: .3rem; } td .meter i { display: block; height: 100%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; font-size: .92rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
dl.sample { border-top: 1px solid var(--line); padding: .5rem 0; } dl.sample pre { margin: .1rem 0; }
pre { font-size: .85rem; line-height: 1.4; white-space: pre-wrap; overflow-wrap: anywhere; }
  summary { cursor: pointer; } pre.wide { columns: 26rem; margin: 0; }
.beside { display: flex; flex-wrap: wrap; gap: 0 3.5rem; } .beside > * { min-width: 0; max-width: 100%; }
code { font-size: .92em; }
@media print { html { font-size: 11px; } body { max-width: none; padding: 0; background: #fff; font-size: 1rem; }
  section, .tile { break-inside: avoid; } section.long { break-inside: auto; } tr { break-inside: avoid; }
  .tall { max-height: none; } .scroll { overflow: visible; } img.trace { min-width: 0; } .screen { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } thead th { position: static; } }
"""
)

_TIMELINE_STYLE = """
.timeline { display: flex; } .timeline svg { display: block; font-size: 11.5px; overflow: hidden; }
.timeline .names { flex: none; } .timeline .names text { fill: var(--ink); }
.timeline .names .soft { fill: var(--soft); font-size: 10.5px; }
.timeline .scroll { flex: 1; min-width: 0; } .timeline .plot { container-type: inline-size; width: 100%; }
.idle { fill: var(--idle); } .rail { fill: var(--idle); opacity: .55; } .mark { stroke: var(--ink);
  stroke-dasharray: 4 3; } .timeline text.mark { stroke: none; fill: var(--ink); }
.slot { fill: transparent; stroke: var(--card); stroke-width: .7; } .slot:hover { stroke: var(--ink);
  stroke-width: 2; }
.timeline text { pointer-events: none; } #zoom2:checked ~ .timeline .plot { width: 200%; }
#zoom4:checked ~ .timeline .plot { width: 400%; }
#zoom8:checked ~ .timeline .plot { width: 800%; }
@media print { .picture .timeline .plot { width: 100% !important; } }
.picture > input { margin: 0 .25rem 0 0; vertical-align: -.1rem; }
.picture > label { margin-right: .8rem; font-size: .9rem; }
""" + "".join(
    f".w{width} {{ display: none; }} @container (min-width: {width}px) {{ .w{width} {{ display: inline; }} }}\n"
    for width in LABEL_WIDTHS
)


@dataclass(frozen=True)
class Part:
    """A named piece of a whole, with what is said of its size."""

    name: str
    size: float
    said: str


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """The whole document; ``style``: what its body needs beside the rules of this module."""
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{_STYLE}{_TIMELINE_STYLE}{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def section(title: str, *parts: str, css_class: str = "") -> str:
    """A card with a heading."""
    named = f" class='{css_class}'" if css_class else ""
    return "\n".join([f"<section{named}><h2>{escape(title)}</h2>", *parts, "</section>"])


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Figures that are seen first: (what it is, the figure, what stands below it)."""
    shown = (
        f"<div class='tile'><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(more)}</span></div>"
        for name, figure, more in figures
    )
    return f"<div class='tiles'>{''.join(shown)}</div>"


def key(fill: str, name: str) -> str:
    """A swatch with its name; ``fill`` may be any CSS background."""
    return f"<span class='key' style='background:{fill}'></span>{escape(name)}"


def whole(parts: Sequence[Part], limit: float | None, limit_said: str, over_said: str) -> str:
    """Parts side by side on one bar, and a line where ``limit`` is; what is beyond it is hatched."""
    total = sum(part.size for part in parts)
    scale = max(total, limit or 0.0) * 1.005 or 1.0
    drawn, at = [], 0.0
    for part, fill in zip(parts, PARTS, strict=False):
        drawn.append(
            f"<i style='left:{at / scale:.3%};width:{part.size / scale:.3%};background:{fill}'"
            f" title='{escape(part.name)}: {escape(part.said)}'></i>"
        )
        at += part.size
    if limit is not None:
        place = limit / scale
        if total > limit:
            width = (total - limit) / scale
            drawn.append(
                f"<i class='over' style='left:{place:.3%};width:{width:.3%}' title='{escape(over_said)}'></i>"
            )
        side = f"right:{1 - place:.3%}" if place > 0.5 else f"left:{place:.3%}"
        drawn.append(
            f"<i class='limit' style='left:{place:.3%}'></i><small style='{side}'>{escape(limit_said)}</small>"
        )
    said = "; ".join(f"{part.name} {part.said}" for part in parts)
    return (
        f"<div class='whole' role='img' aria-label='{escape(said)}; {escape(limit_said)}'>{''.join(drawn)}</div>"
    )


def part_keys(parts: Sequence[Part]) -> str:
    """The legend of ``whole``."""
    shown = (
        f"<li>{key(fill, part.name)} <b>{escape(part.said)}</b></li>"
        for part, fill in zip(parts, PARTS, strict=False)
    )
    return f"<ul class='keys'>{''.join(shown)}</ul>"


def bar_list(rows: Iterable[tuple[str, float, str, str]]) -> str:
    """Shares as bars: (name, share from 0 to 1, fill, what is said of it)."""
    shown = (
        f"<span>{name}</span><i><i style='width:{min(1.0, share):.1%};background:{fill}'></i></i>"
        f"<span>{escape(said)}</span>"
        for name, share, fill, said in rows
    )
    return f"<div class='bars'>{''.join(shown)}</div>"


def meter(share: float, fill: str) -> str:
    """A thin bar in a cell of a table."""
    return f"<span class='meter'><i style='width:{min(1.0, share):.1%};background:{fill}'></i></span>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, in two columns."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(said)}</dd>' for name, said in pairs)}</dl>"
