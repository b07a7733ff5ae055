"""Print a preview of the data on a terminal: rows as the model sees them, trained tokens in colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from rpft.data.dataset import Dataset
from rpft.data.preview import Preview, Run, runs_of
from rpft.data.report import SourceReport
from rpft.data.rows import Row

TRAINED, UNTRAINED, SPECIAL = "green", "bright_black", "bold"
_BAR = 40
_SHORT = 700


def legend(console: Console) -> None:
    """What the colours mean, or the brackets that stand in for them."""
    if console.color_system is None:
        console.print("[[text]] is trained, other text is not; ↵ is a line end", markup=False)
        return
    line = Text.assemble(("trained", TRAINED), "  ", ("not trained", UNTRAINED), "  ", ("special token", SPECIAL))
    console.print(line.append("  ↵ a line end"))


def print_row(console: Console, row: Row, tokenizer: Any, short: bool = False) -> None:
    """One row; ``short`` leaves out the middle of a long one."""
    runs = runs_of(row, tokenizer)
    if short:
        runs = shorten(runs, _SHORT)
    text = Text()
    for run in runs:
        shown = visible(run.text)
        if console.color_system is None:
            text.append(f"[[{shown}]]" if run.trained else shown)
        else:
            style = TRAINED if run.trained else UNTRAINED
            text.append(shown, f"{style} {SPECIAL} reverse" if run.special else style)
    console.print(text, soft_wrap=True)


def shorten(runs: Sequence[Run], limit: int) -> list[Run]:
    """The begin and the end of a row of more than ``limit`` characters."""
    total = sum(len(run.text) for run in runs)
    if total <= limit:
        return list(runs)
    kept: list[Run] = []
    place, head, tail = 0, limit // 2, total - limit // 2
    for run in runs:
        start, end = place, place + len(run.text)
        place = end
        if end <= head or start >= tail:
            kept.append(run)
            continue
        before, after = run.text[: max(0, head - start)], run.text[max(0, tail - start) :]
        if before:
            kept.append(Run(before, run.trained, run.special))
        if not kept or kept[-1].text != " … ":
            kept.append(Run(" … ", False, False))
        if after:
            kept.append(Run(after, run.trained, run.special))
    return kept


def visible(text: str) -> str:
    """Text that moves no cursor: line ends are marked, other control characters written as escapes."""
    return "".join(
        "↵\n" if c == "\n" else c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def print_reports(console: Console, name: str, reports: Sequence[SourceReport]) -> None:
    """What became of the rows of each source, with places to look at."""
    for report in reports:
        console.print(
            f"{name} {report.path} ({report.format}): {report.trained_rows:,} of {report.rows:,} rows trained on,"
            f" {report.trained_tokens:,} of {report.tokens:,} tokens trained",
            markup=False,
            soft_wrap=True,
        )
        for count, what in lost(report):
            place = report.places.get(what, [])
            where = f" ({'; '.join(place[:3])}{'; ...' if count > 3 else ''})" if place else ""
            console.print(f"  {count:,} {what}{where}", markup=False, soft_wrap=True)


def lost(report: SourceReport) -> list[tuple[int, str]]:
    """(count, words) of what did not go through as it stood."""
    found = [(count, reason) for reason, count in report.dropped.items()]
    found += [(report.cut, "cut")] if report.cut else []
    found += [(report.trimmed, "trimmed after the last answer")] if report.trimmed else []
    return [*found, *((count, what) for what, count in report.notes.items())]


def print_figures(console: Console, dataset: Dataset, figures: Preview, max_seq_len: int) -> None:
    """Lengths, packing and duplicates."""
    console.print("\ntokens a row", markup=False)
    most = max(count for _, _, count in figures.histogram)
    for low, high, count in figures.histogram:
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        console.print(f"{low:>7,} to {high:>7,}  {count:>9,} {bar}", markup=False)
    mean = dataset.tokens / len(dataset.rows)
    console.print(
        f"mean {mean:,.0f}; packed into {max_seq_len:,}: {figures.num_packs:,} packs,"
        f" {100 * figures.efficiency:.1f}% of them filled",
        markup=False,
    )
    if figures.repeated:
        console.print(f"{figures.repeated:,} rows have the tokens of an earlier row", markup=False)
