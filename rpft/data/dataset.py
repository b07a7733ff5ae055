"""Load training data into tokenised rows, with a report of what became of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rpft.data.cache import cache_key, default_folder, is_large, read_cached, write_cached
from rpft.data.encode import Encoder
from rpft.data.formats import NO_ANSWER, detect_format
from rpft.data.loader import NOTHING_LEFT, TOO_LONG, DataSettings, RowLoader
from rpft.data.pool import TokenPool
from rpft.data.report import SourceReport
from rpft.data.rows import Block, Row, Rows
from rpft.data.sources import Source, Unread, parse_unread, unread_rows
from rpft.errors import UserError

__all__ = [
    "DataSettings",
    "Dataset",
    "Loading",
    "SourceReport",
    "explain_row",
    "find_row",
    "load_dataset",
    "load_pairs",
]

_ADVICE = {
    TOO_LONG: "raise data.max_seq_len, or set data.truncation to right or left",
    NOTHING_LEFT: "raise data.max_seq_len, or set data.truncation to the other side",
    NO_ANSWER: "add assistant messages, or write the rows as text",
}


@dataclass
class Dataset:
    """The rows of all sources, in the order of the sources and of their rows."""

    rows: Sequence[Row]
    reports: list[SourceReport]

    @property
    def tokens(self) -> int:
        return sum(report.tokens for report in self.reports)

    @property
    def trained_tokens(self) -> int:
        return sum(report.trained_tokens for report in self.reports)


@dataclass(frozen=True)
class Loading:
    """How rows are loaded; nothing here changes what they are.

    processes: those that tokenise a large source. cache: "auto" keeps the tokens of large files in
    ``default_folder``, "off" keeps none, another text is a folder that keeps those of every source. progress:
    called with a source, the rows of it that are done, and whether they are all.
    """

    processes: int = 1
    cache: str = "off"
    progress: Callable[[Source, int, bool], None] | None = None


def load_dataset(
    sources: Iterable[Source], tokenizer: Any, settings: DataSettings, loading: Loading | None = None
) -> Dataset:
    """Read, render, tokenise and cut every row of the sources.

    ``tokenizer`` is a fast tokenizer of transformers. Raises UserError for a row that cannot be read, naming
    file and line, and when no row with a trained token remains.
    """
    loading = loading or Loading()
    with TokenPool(tokenizer, settings, loading.processes) as pool:
        loaded = [_load_source(source, tokenizer, settings, loading, pool) for source in sources]
    dataset = Dataset(Rows(block for block, _ in loaded), [report for _, report in loaded])
    if not dataset.rows:
        raise UserError(_nothing_to_train(dataset.reports))
    return dataset


def load_pairs(sources: Iterable[Source], tokenizer: Any, settings: DataSettings) -> Iterator[tuple[Row, Row]]:
    """(chosen, rejected) of every row of sources of preference pairs, with the checks of every other row.

    Both have the same prompt in front, of which nothing is trained. A pair is dropped when one of the two is.
    """
    pool = TokenPool(tokenizer, settings, 1)
    for source in sources:
        for block, report in pool.blocks(unread_rows(source), source):
            if report.format != "preference":
                raise UserError(f"{source.path} holds rows of format {report.format}, not preference pairs.")
            rows = Rows([block])
            for index in range(0, len(rows), 2):
                yield rows[index], rows[index + 1]


def explain_row(source: Source, index: int, tokenizer: Any, settings: DataSettings) -> list[tuple[int, str, bool]]:
    """The tokens of the row at ``index`` of a source (from 0) as (id, text, trained).

    Of a preference pair, those of the chosen answer and then those of the rejected one. Raises UserError when
    the source has no such row, or the row is dropped.
    """
    encoder = Encoder(tokenizer)
    _, rows = find_row(source, index, tokenizer, settings)
    return [
        (token, encoder.text_of(token), flag)
        for row in rows
        for token, flag in zip(row.ids.tolist(), row.trained.tolist(), strict=True)
    ]


def find_row(source: Source, index: int, tokenizer: Any, settings: DataSettings) -> tuple[str, list[Row]]:
    """(place, rows) of the row at ``index`` of a source: two for a pair. UserError as for ``explain_row``."""
    unread, first = _find(source, index)
    report = SourceReport(source.path, source.format)
    if report.format == "auto":
        report.format = detect_format(parse_unread(first, source.columns))
    rows = RowLoader(tokenizer, settings).rows([unread], index, source, report)
    if not rows:
        raise UserError(f"{unread.where}: this row is not trained on: {', '.join(report.dropped)}.")
    return unread.where, [row for _, row in rows]


def _find(source: Source, index: int) -> tuple[Unread, Unread]:
    """(the row at ``index``, the first row)."""
    first = last = None
    count = 0
    for unread in islice(unread_rows(source), index + 1):
        first, last, count = first or unread, unread, count + 1
    if count <= index or first is None or last is None:
        raise UserError(f"{source.path} has {count} rows; the last one is row {count - 1}.")
    return last, first


def _load_source(
    source: Source, tokenizer: Any, settings: DataSettings, loading: Loading, pool: TokenPool
) -> tuple[Block, SourceReport]:
    report = SourceReport(source.path, source.format)
    folder = _cache_folder(source, loading.cache)
    key = None if folder is None else cache_key(source, tokenizer, settings)
    if folder is not None and key is not None:
        found = read_cached(folder, key)
        if found is not None:
            return found
    blocks = _watched(source, pool.blocks(unread_rows(source), source), loading)
    if folder is not None and key is not None:
        return write_cached(folder, key, blocks, report), report
    kept = []
    for block, part in blocks:
        kept.append(block)
        report.add(part)
    return Block.joined(kept), report


def _cache_folder(source: Source, cache: str) -> Path | None:
    if cache == "off" or (cache == "auto" and not is_large(source)):
        return None
    return default_folder() if cache == "auto" else Path(cache)


def _watched(
    source: Source, blocks: Iterator[tuple[Block, SourceReport]], loading: Loading
) -> Iterator[tuple[Block, SourceReport]]:
    done = 0
    for block, report in blocks:
        yield block, report
        done += report.rows
        if loading.progress is not None:
            loading.progress(source, done, False)
    if loading.progress is not None:
        loading.progress(source, done, True)


def _nothing_to_train(reports: list[SourceReport]) -> str:
    lines = [
        f"{report.path}: {report.rows} rows, "
        + (", ".join(f"{count} dropped: {reason}" for reason, count in report.dropped.items()) or "none read")
        for report in reports
    ]
    reasons = {reason for report in reports for reason in report.dropped}
    advice = "; ".join(text for reason, text in _ADVICE.items() if reason in reasons)
    found = "\n".join(lines) or "no file is named in data"
    return f"No row with a token to train on is left.\n{found}\nWhat to do: {advice or 'look at the rows'}."
