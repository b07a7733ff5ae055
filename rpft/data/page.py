"""A preview of the data as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rpft.data.dataset import Dataset
from rpft.data.preview import Preview, runs_of
from rpft.data.report import SourceReport
from rpft.data.rows import Row
from rpft.data.show import lost
from rpft.draw import page
from rpft.draw.colours import KINDS

_STYLE = """
.t { background: #bfe8c5; } .s { font-weight: bold; outline: 1px solid var(--line); border-radius: 3px; }
.u, .e { color: var(--soft); } .bars { max-width: 40rem; }
td { overflow-wrap: anywhere; } section h3.place::first-letter { text-transform: none; }
section pre { background: var(--bg); padding: .8rem; border-radius: 4px; margin: .2rem 0; }
@media (prefers-color-scheme: dark) { .t { background: #1f5130; } }
@media print { .t { background: #bfe8c5; } }
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
    strangest = f"Strangest of {figures.looked_at:,} rows"
    body = [
        f"<h1>{escape(title)}</h1>",
        "<p><span class='t'>trained</span> <span class='u'>not trained</span> <span class='s'>special token</span>"
        " <span class='e'>↵</span> a line end</p>",
        page.tiles(_tiles(dataset, figures, max_seq_len)),
        page.section("Training", *_table(dataset.reports)),
        *([page.section("Evaluation", *_table(evaluation))] if evaluation else []),
        *(f"<p>{escape(line)}</p>" for line in lines),
        page.section("Tokens a row", _lengths(figures)),
        page.section("First rows", *(_row(at, "", row, tokenizer) for at, row in first_rows), css_class="long"),
        page.section(
            strangest,
            *(_row(strange.where, strange.why, strange.row, tokenizer) for strange in figures.strangest),
            css_class="long",
        ),
    ]
    return page.page(title, body, _STYLE)


def _tiles(dataset: Dataset, figures: Preview, max_seq_len: int) -> Iterator[tuple[str, str, str]]:
    count = len(dataset.rows)
    yield "rows", f"{count:,}", "that are trained on"
    yield "tokens", f"{dataset.tokens:,}", f"{dataset.trained_tokens:,} of them trained"
    yield "tokens a row", f"{dataset.tokens / count:,.0f}", "mean"
    yield "packed", f"{figures.num_packs:,}", f"packs of {max_seq_len:,}, {100 * figures.efficiency:.1f}% filled"
    if figures.repeated:
        yield "repeated", f"{figures.repeated:,}", "rows have the tokens of an earlier row"


def _table(reports: Sequence[SourceReport]) -> Iterator[str]:
    yield "<div class='scroll' tabindex='0' role='region' aria-label='sources'><table class='loose'><thead><tr>"
    yield "<th>source</th><th>format</th><th class='n'>rows</th><th class='n'>trained on</th>"
    yield "<th class='n'>tokens</th><th class='n'>trained</th><th>lost and noted</th></tr></thead><tbody>"
    for report in reports:
        said = "<br>".join(
            escape(f"{count:,} {what}") + _places(report.places.get(what, [])) for count, what in lost(report)
        )
        yield (
            f"<tr><td>{escape(report.path)}</td><td>{report.format}</td><td class='n'>{report.rows:,}</td>"
            f"<td class='n'>{report.trained_rows:,}</td><td class='n'>{report.tokens:,}</td>"
            f"<td class='n'>{report.trained_tokens:,}</td><td>{said}</td></tr>"
        )
    yield "</tbody></table></div>"


def _places(places: Sequence[str]) -> str:
    return f" <span class='e'>{escape('; '.join(places))}</span>" if places else ""


def _lengths(figures: Preview) -> str:
    most = max(count for _, _, count in figures.histogram)
    return page.bar_list(
        (f"{low:,} to {high:,}", count / most, KINDS["backward"], f"{count:,}")
        for low, high, count in figures.histogram
    )


def _row(where: str, why: str, row: Row, tokenizer: Any) -> str:
    pieces = []
    for run in runs_of(row, tokenizer):
        kinds = ("t" if run.trained else "u") + (" s" if run.special else "")
        text = escape("".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in run.text))
        marked = text.replace("\n", "<span class='e'>↵</span>\n")
        pieces.append(f"<span class='{kinds}'>{marked}</span>")
    reason = f": {escape(why)}" if why else ""
    return f"<h3 class='place'>{escape(where)}{reason}</h3><pre>{''.join(pieces)}</pre>"
