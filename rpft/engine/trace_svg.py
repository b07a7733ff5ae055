"""A picture of a trace: a row a stream, grouped by worker, coloured by kind of work, over a time axis."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rpft.engine.trace import PART, TASK, WAIT, Span, Trace

_COLOURS = {
    # kind: fill, text on it. Hues that the colour-blind can tell apart (Okabe and Ito).
    "forward": ("#56b4e9", "#111"),
    "fused": ("#cc79a7", "#111"),
    "backward": ("#0072b2", "#fff"),
    "loss": ("#9ad0c2", "#111"),
    "weights": ("#e69f00", "#111"),
    "activations": ("#009e73", "#fff"),
    "gradients": ("#d55e00", "#fff"),
    "optimizer": ("#8f7fd6", "#111"),
    "other": ("#a0a0a0", "#111"),
}
_NAMES = {"weights": "weights up", "loss": "evaluation"}
_INK = "#6e7781"
"""A grey that is read on white and on black alike."""

_WIDTH, _LEFT, _RIGHT = 1200, 128, 12
_ROW, _BAR, _HEADER, _LEGEND = 19, 14, 20, 30
_PLOT = _WIDTH - _LEFT - _RIGHT
_MOST_BLOCKS = 3000
"""Blocks of a picture: at some 80 bytes each they stay under 250 KB."""
_SLOT = re.compile(r"slot \d+ \(\w+ stage \[[^]]*\]\)")
_CHARACTER = 6.0
"""Width of a character of a label."""


@dataclass
class _Block:
    kind: str
    nature: str
    slot: str
    """Of compute, where slots are told apart: "slot 12 (backward stage [3..4])"."""
    start_seconds: float
    end_seconds: float


def write_svg(trace: Trace, path: Path) -> None:
    """Draws the whole of ``trace``; ``Trace.between`` and ``Trace.step`` choose a window.

    Full bars are work; where parts of a stream's tasks were noted, these are, and the task a pale bar behind them.
    A thin line is a wait for other streams. Spans of a kind that nearly touch are drawn as one.
    """
    rows, closed_seconds = _rows_that_fit(trace)
    seconds = trace.end_seconds - trace.start_seconds
    body: list[str] = []
    y, worker = _LEGEND, ""
    for (row_worker, stream), blocks in zip(trace.rows, rows, strict=True):
        if row_worker != worker:
            worker = row_worker
            body.append(_text(4, y + 14, worker, weight="bold"))
            y += _HEADER
        body.append(_text(12, y + 11, stream))
        slots: dict[str, tuple[str, float, float]] = {}
        for block in blocks:
            x, end = (
                _LEFT + (t - trace.start_seconds) / seconds * _PLOT
                for t in (block.start_seconds, block.end_seconds)
            )
            body.append(_bar(block, x, end - x, y))
            if block.slot and block.nature != WAIT:
                slots[block.slot] = block.kind, slots.get(block.slot, ("", x, x))[1], end
        for slot, (kind, x, end) in slots.items():
            stage = slot[slot.index("[") : -1]
            if end - x > _CHARACTER * len(stage) + 4:
                body.append(_text((x + end) / 2, y + 11, stage, anchor="middle", fill=_COLOURS[kind][1]))
        y += _ROW
    y += 4
    note = f"one window of {seconds * 1e3:.1f} ms; gaps under {closed_seconds * 1e3:.2g} ms are not drawn"
    height = y + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape('What each stream did, ' + note)}</title>",
        *_legend([block for blocks in rows for block in blocks]),
        *_axis(seconds, y),
        *body,
        _text(_LEFT, y + 34, note),
        "</svg>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _kind(span: Span) -> str:
    return span.kind if span.kind in _COLOURS else "other"


def _rows_that_fit(trace: Trace) -> tuple[list[list[_Block]], float]:
    """The blocks of each row, in order of start, and the longest gap that was closed, in seconds."""
    pixel_seconds = (trace.end_seconds - trace.start_seconds) / _PLOT
    of: dict[tuple[str, str], list[Span]] = {row: [] for row in trace.rows}
    for span in sorted(trace.spans, key=lambda s: s.start_seconds):
        of[span.worker, span.stream].append(span)
    gap_seconds, by_stage = 0.5 * pixel_seconds, True
    while True:
        rows = [_merged(spans, gap_seconds, by_stage) for spans in of.values()]
        if sum(map(len, rows)) <= _MOST_BLOCKS:
            return rows, gap_seconds
        if by_stage:
            by_stage = False
        else:
            gap_seconds *= 2


def _merged(spans: list[Span], gap_seconds: float, by_stage: bool) -> list[_Block]:
    """Joins spans of one kind (and, ``by_stage``, of one slot) that at most ``gap_seconds`` part."""
    has_parts = any(s.nature == PART for s in spans)
    last: dict[tuple[str, ...], _Block] = {}
    blocks = []
    for s in spans:
        slot = _SLOT.match(s.what) if by_stage and s.stream == "compute" else None
        key = (s.nature, _kind(s), slot.group(0) if slot else "")
        block = last.get(key)
        if block is not None and s.start_seconds - block.end_seconds <= gap_seconds:
            block.end_seconds = max(block.end_seconds, s.end_seconds)
            continue
        nature = "pale" if has_parts and s.nature == TASK else s.nature
        block = _Block(_kind(s), nature, slot.group(0) if slot else "", s.start_seconds, s.end_seconds)
        last[key] = block
        blocks.append(block)
    return blocks


def _bar(block: _Block, x: float, width: float, y: int) -> str:
    width = max(width, 0.4)
    if block.nature == WAIT:
        return f'<rect x="{x:.1f}" y="{y + 6}" width="{width:.1f}" height="2" fill="{_INK}" opacity=".4"/>'
    fill = _COLOURS[block.kind][0]
    pale = ' opacity=".3"' if block.nature == "pale" else ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{fill}"{pale}/>'


def _text(
    x: float, y: float, content: str, anchor: str = "start", fill: str = _INK, weight: str = "normal"
) -> str:
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    more += "" if weight == "normal" else f' font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{more}>{escape(content)}</text>'


def _legend(blocks: list[_Block]) -> list[str]:
    """One swatch a kind that is drawn."""
    drawn = {block.kind for block in blocks if block.nature != WAIT}
    parts, x = [], float(_LEFT)
    for kind in [kind for kind in _COLOURS if kind in drawn]:
        name = _NAMES.get(kind, kind)
        parts.append(f'<rect x="{x:.1f}" y="8" width="12" height="12" fill="{_COLOURS[kind][0]}"/>')
        parts.append(_text(x + 16, 18, name))
        x += 34 + _CHARACTER * len(name)
    if any(block.nature == WAIT for block in blocks):
        parts.append(f'<rect x="{x:.1f}" y="13" width="12" height="2" fill="{_INK}"/>')
        parts.append(_text(x + 16, 18, "waits"))
    return parts


def _axis(seconds: float, y: int) -> list[str]:
    """About ten ticks at round numbers of milliseconds, with lines up through the rows."""
    rough = seconds * 1e3 / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    parts = []
    for i in range(math.floor(seconds * 1e3 / step) + 1):
        x = _LEFT + i * step / (seconds * 1e3) * _PLOT
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_LEGEND}" y2="{y}" stroke="{_INK}" stroke-opacity=".3"/>'
        )
        parts.append(_text(x, y + 14, f"{i * step:g}" + (" ms" if i == 0 else ""), anchor="middle"))
    return parts
