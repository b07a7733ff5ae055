"""Carry rows from what a source holds to tokens: parse, render, tokenise, cut; every row is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rpft.data.encode import Encoder
from rpft.data.formats import Chat, Completion, Dropped, Pair, Parsed, Tokens, detect_format, parse_row
from rpft.data.mask import TrainOn, render_with_spans
from rpft.data.render import ChatRenderer, Span, count_removed_thoughts, merge_system
from rpft.data.report import SourceReport
from rpft.data.rows import Block, Row
from rpft.data.sources import Source, Unread, parse_unread
from rpft.data.templates import PINNED_DATE
from rpft.errors import UserError

TOO_LONG = "longer than max_seq_len"
NOTHING_TRAINED = "no trained token"
NOTHING_LEFT = "no trained token left after the cut"

THOUGHTS_REMOVED = "thinking blocks taken out by the chat template"
SPECIAL_WRITTEN = "messages that write a special token, which the model reads as one"
DATE_PINNED = "rows with the pinned date, where the chat template prints today's"


@dataclass(frozen=True)
class DataSettings:
    """How rows become tokens.

    max_seq_len: most tokens of a row. truncation: what happens to a longer row; a row cut on the right keeps
    no end token, so it is not taught to end at the cut, and one cut on the left keeps its begin token.
    train_on: which messages are trained; with "all" nothing is trimmed from a chat's end. system_role
    "merge" puts system messages in front of the next user message, "error" leaves them to the template.
    chat_template: the text of a jinja template, None for the tokenizer's own. template_kwargs: further
    variables of it. template_date: what it prints for today, as YYYY-MM-DD.
    """

    max_seq_len: int
    truncation: Literal["drop", "left", "right", "error"] = "drop"
    train_on: TrainOn = "assistant"
    system_role: Literal["error", "merge"] = "error"
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    template_date: str = PINNED_DATE


@dataclass(frozen=True)
class _Part:
    """A text on its way to the tokenizer, or a row that is tokenised already. A row of a pair has two."""

    text: str
    spans: list[Span]
    end: bool
    row: Row | None = None


class RowLoader:
    """Turns unread rows into blocks of tokens. A function of its arguments: rows do not see each other."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self.encoder = Encoder(tokenizer)
        self._settings = settings
        self._renderer = ChatRenderer(
            tokenizer, settings.chat_template, settings.template_kwargs, settings.template_date
        )
        self._special = [token for token in self.encoder.special_tokens if token]
        self._special_firsts = tuple({token[0] for token in self._special})
        self._special_starts = tuple({token[:2] for token in self._special})

    def load(self, batch: Sequence[Unread], first: int, source: Source) -> tuple[Block, SourceReport]:
        """The rows of ``batch`` that are trained, and what became of all of them.

        ``first`` is the ordinal of the first of them in the source. A source of format auto takes that of the
        batch's first row.
        """
        report = SourceReport(source.path, source.format)
        ordinals, rows = [], []
        for ordinal, row in self.rows(batch, first, source, report):
            ordinals.append(ordinal)
            rows.append(row)
        return Block.of(rows, ordinals), report

    def rows(
        self, batch: Sequence[Unread], first: int, source: Source, report: SourceReport
    ) -> list[tuple[int, Row]]:
        """(ordinal, row) of the trained rows of a batch; a pair gives two, the chosen one first."""
        report.rows += len(batch)
        waiting: list[tuple[int, str, list[_Part]]] = []
        for ordinal, unread in enumerate(batch, start=first):
            raw = parse_unread(unread, source.columns)
            if report.format == "auto":
                report.format = detect_format(raw)
            parts = self._parts(parse_row(raw, report.format), raw.where, report)
            if isinstance(parts, Dropped):
                report.drop(parts.reason, raw.where)
            else:
                waiting.append((ordinal, raw.where, parts))
        texts = [part for _, _, parts in waiting for part in parts if part.row is None]
        encoded = iter(
            self.encoder.encode([p.text for p in texts], [p.spans for p in texts], [p.end for p in texts])
            if texts
            else ()
        )
        kept: list[tuple[int, Row]] = []
        for ordinal, where, parts in waiting:
            whole = [next(encoded) if part.row is None else part.row for part in parts]
            kept += [(ordinal, row) for row in self._keep(whole, where, report)]
        return kept

    def _parts(self, parsed: Parsed, where: str, report: SourceReport) -> list[_Part] | Dropped:
        if isinstance(parsed, Dropped):
            return parsed
        if isinstance(parsed, Tokens):
            return [self._tokens(parsed, where)]
        if isinstance(parsed, Pair):
            return [self._text(side, "completion", where, report) for side in (parsed.chosen, parsed.rejected)]
        return [self._text(parsed, self._settings.train_on, where, report)]

    def _text(self, parsed: Chat | Completion | str, train_on: TrainOn, where: str, report: SourceReport) -> _Part:
        end = True
        if isinstance(parsed, str):
            text, spans = parsed, [(0, len(parsed))]
        elif isinstance(parsed, Completion):
            text = parsed.prompt + parsed.completion
            spans = [(0 if train_on == "all" else len(parsed.prompt), len(text))]
        else:
            end = False
            chat = self._prepare(parsed, train_on, where, report)
            text, spans = render_with_spans(chat, train_on, self._renderer, self.encoder.special_tokens, where)
            self._look(chat, text, where, report)
        if not text.isascii():
            _refuse_half_characters(text, where)
        return _Part(text, spans, end)

    def _prepare(self, chat: Chat, train_on: TrainOn, where: str, report: SourceReport) -> Chat:
        if self._settings.system_role == "merge":
            chat = merge_system(chat, where)
        if train_on == "all":
            return chat
        length = 1 + max(i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
        if length < len(chat.messages):
            report.trimmed += 1
            chat = replace(chat, messages=chat.messages[:length], trainable=chat.trainable[:length])
        return chat

    def _look(self, chat: Chat, text: str, where: str, report: SourceReport) -> None:
        """Counts what a person would not expect in the rendering of a chat."""
        if removed := count_removed_thoughts(chat, text):
            report.note(THOUGHTS_REMOVED, where, removed)
        if self._renderer.prints_date:
            report.note(DATE_PINNED, where)
        written = sum(isinstance(m["content"], str) and self._writes_special(m["content"]) for m in chat.messages)
        if written:
            report.note(SPECIAL_WRITTEN, where, written)

    def _writes_special(self, said: str) -> bool:
        # Tokenizers have thousands of special tokens, which begin alike.
        if not any(first in said for first in self._special_firsts):
            return False
        return any(start in said for start in self._special_starts) and any(
            token in said for token in self._special
        )

    def _tokens(self, parsed: Tokens, where: str) -> _Part:
        ids = np.array(parsed.ids, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.encoder.num_ids:
            wrong = int(ids[(ids < 0) | (ids >= self.encoder.num_ids)][0])
            raise UserError(
                f"{where}: input_ids holds {wrong}, the tokenizer has ids 0 to {self.encoder.num_ids - 1}: the row"
                " was made with another tokenizer."
            )
        trained = np.ones(len(ids), dtype=bool) if parsed.trained is None else np.array(parsed.trained, dtype=bool)
        trained[0] = False
        return _Part("", [], False, Row(ids.astype(np.int32), trained))

    def _keep(self, whole: list[Row], where: str, report: SourceReport) -> list[Row]:
        """The rows of one place cut to the limit and counted; none when one of them is dropped."""
        fitted = []
        for row in whole:
            result = self._fit(row, where)
            if isinstance(result, Dropped):
                report.drop(result.reason, where)
                return []
            fitted.append(result)
        report.trained_rows += 1
        if any(len(short.ids) < len(row.ids) for short, row in zip(fitted, whole, strict=True)):
            report.shorten(where)
        report.tokens += sum(len(row.ids) for row in fitted)
        report.trained_tokens += sum(int(np.count_nonzero(row.trained)) for row in fitted)
        return fitted

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


def _refuse_half_characters(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise UserError(
            f"{where}: the text holds \\u{half:04x}, half of a character that takes two such escapes, and no "
            "token stands for it. Correct the row."
        ) from error
