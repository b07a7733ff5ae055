"""Tokenise rendered texts in batches and turn trained characters into trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rpft.data.render import Span
from rpft.errors import UserError


@dataclass(frozen=True, eq=False)
class Row:
    """The token ids of one row and which of them are trained.

    ids: int32 [length]; trained: bool [length]. ``trained[0]`` is always false: nothing stands before the
    first token from which it could be predicted, so ``trained.sum()`` is the number of labels of the row.
    """

    ids: np.ndarray
    trained: np.ndarray


class Encoder:
    """A fast tokenizer, called on many texts at once.

    The begin token stands exactly once, at index 0, when the template prints it or the tokenizer adds it;
    neither is asked for it twice.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which does not say which characters a "
                "token stands for: use a checkpoint with a tokenizer.json (model.path)."
            )
        self._tokenizer = tokenizer
        self.special_tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        begin = tokenizer.bos_token_id
        self._begin_id = begin if begin is not None and tokenizer("a").input_ids[0] == begin else None

    def encode(self, texts: list[str], spans: list[list[Span]], ends: list[bool]) -> list[Row]:
        """Tokenise texts; ``spans`` are each text's trained characters, ``ends`` asks for an end token.

        A token is trained when at least one of its characters is: the first token of an answer is then not
        lost to a blank of the prompt that it starts with.
        """
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            self._row(np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64), row_spans, end)
            for ids, offsets, row_spans, end in zip(
                encoded["input_ids"], encoded["offset_mapping"], spans, ends, strict=True
            )
        ]

    def _row(self, ids: np.ndarray, offsets: np.ndarray, spans: list[Span], end: bool) -> Row:
        trained = _overlaps(offsets.reshape(-1, 2), spans)
        if self._begin_id is not None and (not ids.size or ids[0] != self._begin_id):
            ids = np.concatenate([np.array([self._begin_id], dtype=np.int32), ids])
            trained = np.concatenate([np.array([False]), trained])
        if end and (not ids.size or ids[-1] != self._end_id()):
            ids = np.concatenate([ids, np.array([self._end_id()], dtype=np.int32)])
            trained = np.concatenate([trained, np.array([True])])
        trained[:1] = False
        return Row(ids, trained)

    def _end_id(self) -> int:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise UserError(
                "The tokenizer names no end-of-text token (eos_token), which text rows end with: set it in "
                "the checkpoint's tokenizer_config.json."
            )
        return end

    def begins(self, row: Row) -> bool:
        """Whether the row starts with the tokenizer's begin token."""
        begin = self._tokenizer.bos_token_id
        return begin is not None and row.ids.size > 0 and int(row.ids[0]) == begin

    def text_of(self, token_id: int) -> str:
        """What one token stands for; a part of a character shows as U+FFFD."""
        return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)


def _overlaps(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    # Byte-level tokenizers that trim offsets report a token of blanks as empty, at the end of its blanks: it
    # then stands for what lies between the token before and there.
    empty = np.flatnonzero(starts == ends)
    empty = empty[empty > 0]
    starts[empty] = np.minimum(starts[empty], ends[empty - 1])
    trained = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        trained |= (starts < end) & (ends > start)
    return trained
