"""Load training files into tokenised rows, with a report of what became of every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from rpft.data.encode import Encoder, Row
from rpft.data.formats import NO_ANSWER, Chat, Dropped, detect_format, parse_row
from rpft.data.mask import TrainOn, render_with_spans
from rpft.data.render import ChatRenderer, Span, merge_system
from rpft.data.sources import Format, RawRow, Source, read_rows
from rpft.errors import UserError

TOO_LONG = "longer than max_seq_len"
NOTHING_TRAINED = "no trained token"
NOTHING_LEFT = "no trained token left after the cut"

# Texts handed to the tokenizer at once: enough to keep its threads busy, few enough to stay small in RAM.
_BATCH_ROWS = 256

_ADVICE = {
    TOO_LONG: "raise data.max_seq_len, or set data.truncation to right or left",
    NOTHING_LEFT: "raise data.max_seq_len, or set data.truncation to the other side",
    NO_ANSWER: "add assistant messages, or write the rows as text",
}


@dataclass(frozen=True)
class DataSettings:
    """How rows become tokens.

    max_seq_len: most tokens of a row. truncation: what happens to a longer row; a row cut on the right keeps
    no end token, so it is not taught to end at the cut, and one cut on the left keeps its begin token.
    train_on: which messages are trained; with "all" nothing is trimmed from a chat's end. system_role
    "merge" puts system messages in front of the next user message, "error" leaves them to the template.
    chat_template: the text of a jinja template, None for the tokenizer's own.
    """

    max_seq_len: int
    truncation: Literal["drop", "left", "right", "error"] = "drop"
    train_on: TrainOn = "assistant"
    system_role: Literal["error", "merge"] = "error"
    chat_template: str | None = None


@dataclass
class SourceReport:
    """What became of the rows of one file.

    rows = trained_rows + the sum of dropped. ``trimmed`` counts chats whose messages after the last answer
    were taken off, ``cut`` the kept rows that truncation shortened. tokens and trained_tokens are of the kept
    rows.
    """

    path: str
    format: Format = "auto"
    rows: int = 0
    trained_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    trimmed: int = 0
    cut: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class Dataset:
    """The rows of all sources, in the order of the sources and of their files."""

    rows: list[Row]
    reports: list[SourceReport]

    @property
    def tokens(self) -> int:
        return sum(report.tokens for report in self.reports)

    @property
    def trained_tokens(self) -> int:
        return sum(report.trained_tokens for report in self.reports)


def load_dataset(sources: Iterable[Source], tokenizer: Any, settings: DataSettings) -> Dataset:
    """Read, render, tokenise and cut every row of the sources.

    ``tokenizer`` is a fast tokenizer of transformers. Raises UserError for a row that cannot be read, naming
    file and line, and when no row with a trained token remains.
    """
    loader = _Loader(tokenizer, settings)
    dataset = Dataset([], [])
    for source in sources:
        report = SourceReport(source.path)
        dataset.rows += loader.rows(source, report)
        dataset.reports.append(report)
    if not dataset.rows:
        raise UserError(_nothing_to_train(dataset.reports))
    return dataset


def explain_row(source: Source, index: int, tokenizer: Any, settings: DataSettings) -> list[tuple[int, str, bool]]:
    """The tokens of the row at ``index`` of a file (from 0) as (id, text, trained).

    Raises UserError when the file has no such row, or the row is dropped.
    """
    loader = _Loader(tokenizer, settings)
    report = SourceReport(source.path)
    raw = list(islice(read_rows(source), index + 1))
    if len(raw) <= index:
        raise UserError(f"{source.path} has {len(raw)} rows; the last one is row {len(raw) - 1}.")
    report.format = detect_format(raw[0]) if source.format == "auto" else source.format
    rows = list(loader.encode(raw[index:], report))
    if not rows:
        raise UserError(f"{raw[index].where}: this row is not trained on: {', '.join(report.dropped)}.")
    ids, trained = rows[0].ids.tolist(), rows[0].trained.tolist()
    return [(i, loader.encoder.text_of(i), t) for i, t in zip(ids, trained, strict=True)]


@dataclass(frozen=True)
class _Rendered:
    """A row on its way to the tokenizer."""

    where: str
    text: str
    spans: list[Span]
    end: bool


class _Loader:
    """Carries rows from file to tokens and counts into the report of their source."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self.encoder = Encoder(tokenizer)
        self._renderer = ChatRenderer(tokenizer, settings.chat_template)
        self._settings = settings

    def rows(self, source: Source, report: SourceReport) -> Iterator[Row]:
        stream = read_rows(source)
        report.format = source.format
        while batch := list(islice(stream, _BATCH_ROWS)):
            if report.format == "auto":
                report.format = detect_format(batch[0])
            yield from self.encode(batch, report)

    def encode(self, batch: list[RawRow], report: SourceReport) -> Iterator[Row]:
        report.rows += len(batch)
        rendered = []
        for raw in batch:
            result = self._render(raw, report)
            if isinstance(result, Dropped):
                _count(report, result)
            else:
                rendered.append(result)
        if not rendered:
            return
        rows = self.encoder.encode(
            [r.text for r in rendered], [r.spans for r in rendered], [r.end for r in rendered]
        )
        for row, origin in zip(rows, rendered, strict=True):
            result = self._fit(row, origin.where)
            if isinstance(result, Dropped):
                _count(report, result)
                continue
            report.trained_rows += 1
            report.cut += len(result.ids) < len(row.ids)
            report.tokens += len(result.ids)
            report.trained_tokens += int(result.trained.sum())
            yield result

    def _render(self, raw: RawRow, report: SourceReport) -> _Rendered | Dropped:
        parsed = parse_row(raw, report.format)
        if isinstance(parsed, Dropped):
            return parsed
        if isinstance(parsed, str):
            text, spans, end = parsed, [(0, len(parsed))], True
        else:
            chat = self._prepare(parsed, raw.where, report)
            text, spans = render_with_spans(
                chat, self._settings.train_on, self._renderer, self.encoder.special_tokens, raw.where
            )
            end = False
        if not text.isascii():
            _refuse_half_characters(text, raw.where)
        return _Rendered(raw.where, text, spans, end)

    def _prepare(self, chat: Chat, where: str, report: SourceReport) -> Chat:
        if self._settings.system_role == "merge":
            chat = merge_system(chat, where)
        if self._settings.train_on == "all":
            return chat
        length = 1 + max(i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
        if length < len(chat.messages):
            report.trimmed += 1
            chat = replace(chat, messages=chat.messages[:length], trainable=chat.trainable[:length])
        return chat

    def _fit(self, row: Row, where: str) -> Row | Dropped:
        if not row.trained.any():
            return Dropped(NOTHING_TRAINED)
        limit = self._settings.max_seq_len
        length = len(row.ids)
        if length <= limit:
            return row
        if self._settings.truncation == "drop":
            return Dropped(TOO_LONG)
        if self._settings.truncation == "error":
            raise UserError(
                f"{where}: the row has {length} tokens, data.max_seq_len is {limit}: raise it, shorten the "
                "row, or set data.truncation to drop, left or right."
            )
        if self._settings.truncation == "right":
            kept = np.arange(limit)
        else:
            kept = np.arange(length - limit, length)
            if self.encoder.begins(row):
                kept[0] = 0
        ids, trained = row.ids[kept], row.trained[kept]
        trained[0] = False
        return Row(ids, trained) if trained.any() else Dropped(NOTHING_LEFT)


def _count(report: SourceReport, dropped: Dropped) -> None:
    report.dropped[dropped.reason] = report.dropped.get(dropped.reason, 0) + 1


def _refuse_half_characters(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise UserError(
            f"{where}: the text holds \\u{half:04x}, half of a character that takes two such escapes, and no "
            "token stands for it. Correct the row."
        ) from error


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
