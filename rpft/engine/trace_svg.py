"""A picture of a trace: a row a stream, grouped by worker, coloured by kind of work, over a time axis."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

from rpft.draw.colours import KINDS
from rpft.draw.timeline import BAR, Block, Lane, Named, Ruler, axis, bars, fitted, legend, text
from rpft.engine.trace import PART, TASK, WAIT, Span, Trace

_WIDTH, _LEFT, _RIGHT = 1200, 128, 12
_ROW, _HEADER, _LEGEND = 19, 20, 30
_PLOT = _WIDTH - _LEFT - _RIGHT
_SLOT = re.compile(r"slot \d+ \(\w+ stage \[[^]]*\]\)")


def write_svg(trace: Trace, path: Path) -> None:
    """Draws the whole of ``trace``; ``Trace.between`` and ``Trace.step`` choose a window.

    Full bars are work; where parts of a stream's tasks were noted, these are, and the task a pale bar behind them.
    A thin line is a wait for other streams. Spans of a kind that nearly touch are drawn as one.
    """
    seconds = trace.end_seconds - trace.start_seconds
    ruler = Ruler(trace.start_seconds, trace.end_seconds, _LEFT, _PLOT)
    lanes, closed_seconds = fitted(_blocks(trace), seconds, _PLOT)
    body: list[str] = []
    y, worker = _LEGEND, ""
    for (row_worker, stream), blocks in zip(trace.rows, lanes, strict=True):
        if row_worker != worker:
            worker = row_worker
            body.append(text(4, y + 14, worker, weight="bold"))
            y += _HEADER
        body.append(text(12, y + 11, stream))
        body += bars(Lane(blocks, _slots(blocks)), ruler, y, BAR)
        y += _ROW
    y += 4
    note = f"one window of {seconds * 1e3:.1f} ms; gaps under {closed_seconds * 1e3:.2g} ms are not drawn"
    height = y + 44
    drawn = [block for blocks in lanes for block in blocks]
    kinds = {block.kind for block in drawn if block.nature != "wait"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape('What each stream did, ' + note)}</title>",
        *legend(kinds, any(block.nature == "wait" for block in drawn), _LEFT),
        *axis(ruler, trace.start_seconds, _LEGEND, y),
        *body,
        text(_LEFT, y + 34, note),
        "</svg>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _blocks(trace: Trace) -> list[list[Block]]:
    """Those of each row."""
    of: dict[tuple[str, str], list[Span]] = {row: [] for row in trace.rows}
    for span in trace.spans:
        of[span.worker, span.stream].append(span)
    lanes = []
    for spans in of.values():
        has_parts = any(s.nature == PART for s in spans)
        lanes.append([_block(s, has_parts) for s in spans])
    return lanes


def _block(span: Span, has_parts: bool) -> Block:
    slot = _SLOT.match(span.what) if span.stream == "compute" else None
    if span.nature == WAIT:
        nature = "wait"
    else:
        nature = "pale" if has_parts and span.nature == TASK else "solid"
    kind = span.kind if span.kind in KINDS else "other"
    return Block(kind, span.start_seconds, span.end_seconds, nature, slot.group(0) if slot else "")


def _slots(blocks: list[Block]) -> list[Named]:
    """The stages of the slots that are still told apart, each from its first block to its last."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        if block.group and block.nature != "wait":
            found.setdefault(block.group, []).append(block)
    return [
        Named(some[0].start_seconds, some[-1].end_seconds, slot[slot.index("[") : -1], KINDS[some[-1].kind])
        for slot, some in found.items()
    ]
