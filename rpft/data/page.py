"""A preview of the data as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rpft.data.dataset import Dataset
from rpft.data.preview import Preview, runs_of
from rpft.data.report import SourceReport
from rpft.data.rows import Row
from rpft.data.show import lost

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .8rem; border-radius: 4px; }
.t { background: #bfe8c5; } .s { font-weight: bold; outline: 1px solid #999; border-radius: 3px; }
.u { color: #666; } .e { color: #999; } .bar { background: #5a9; height: .8rem; display: inline-block; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #ddd; }
  pre { background: #22252a; } .t { background: #1f5130; } .u { color: #aaa; }
}
"""


def render_page(
    title: str,
    dataset: Dataset,
    evaluation: Sequence[SourceReport],
    lines: Sequence[str],
    figures: Preview,
    first_rows: Sequence[tuple[str, Row]],
    tokenizer: Any,
    max_seq_len: int,
) -> str:
    """The page. lines: what to say of evaluation rows; first_rows: (place, row) of others than the strangest."""
    parts = [
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        "<p><span class='t'>trained</span> <span class='u'>not trained</span> <span class='s'>special token</span>"
        " <span class='e'>↵</span> a line end</p>",
        _table("Training", dataset.reports),
    ]
    if evaluation:
        parts.append(_table("Evaluation", evaluation))
    parts += [f"<p>{escape(line)}</p>" for line in lines]
    parts.append(_figures(dataset, figures, max_seq_len))
    parts.append("<h2>First rows</h2>")
    parts += [_row(where, "", row, tokenizer) for where, row in first_rows]
    parts.append(f"<h2>Strangest of {figures.looked_at:,} rows</h2>")
    parts += [_row(strange.where, strange.why, strange.row, tokenizer) for strange in figures.strangest]
    return "\n".join([*parts, "</body></html>\n"])


def _table(name: str, reports: Sequence[SourceReport]) -> str:
    lines = [
        f"<h2>{name}</h2><table><tr><th>source<th>format<th class='n'>rows<th class='n'>trained on"
        "<th class='n'>tokens<th class='n'>trained<th>lost and noted</tr>"
    ]
    for report in reports:
        said = "<br>".join(
            escape(f"{count:,} {what}") + _places(report.places.get(what, [])) for count, what in lost(report)
        )
        lines.append(
            f"<tr><td>{escape(report.path)}<td>{report.format}<td class='n'>{report.rows:,}"
            f"<td class='n'>{report.trained_rows:,}<td class='n'>{report.tokens:,}"
            f"<td class='n'>{report.trained_tokens:,}<td>{said}</tr>"
        )
    return "\n".join([*lines, "</table>"])


def _places(places: Sequence[str]) -> str:
    return f" <span class='e'>{escape('; '.join(places))}</span>" if places else ""


def _figures(dataset: Dataset, figures: Preview, max_seq_len: int) -> str:
    most = max(count for _, _, count in figures.histogram)
    lines = ["<h2>Tokens a row</h2><table>"]
    for low, high, count in figures.histogram:
        lines.append(
            f"<tr><td class='n'>{low:,} to {high:,}<td class='n'>{count:,}"
            f"<td><span class='bar' style='width:{24 * count / most:.2f}rem'></span></tr>"
        )
    repeated = f"; {figures.repeated:,} rows have the tokens of an earlier row" if figures.repeated else ""
    mean = dataset.tokens / len(dataset.rows)
    lines.append(
        f"</table><p>mean {mean:,.0f}; packed into {max_seq_len:,}: {figures.num_packs:,} packs,"
        f" {100 * figures.efficiency:.1f}% of them filled{repeated}</p>"
    )
    return "\n".join(lines)


def _row(where: str, why: str, row: Row, tokenizer: Any) -> str:
    pieces = []
    for run in runs_of(row, tokenizer):
        kinds = ("t" if run.trained else "u") + (" s" if run.special else "")
        text = escape("".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in run.text))
        marked = text.replace("\n", "<span class='e'>↵</span>\n")
        pieces.append(f"<span class='{kinds}'>{marked}</span>")
    reason = f": {escape(why)}" if why else ""
    return f"<h3>{escape(where)}{reason}</h3><pre>{''.join(pieces)}</pre>"
