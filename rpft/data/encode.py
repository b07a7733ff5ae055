"""Tokenise rendered texts in batches and turn trained characters into trained tokens."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rpft.data.render import Span
from rpft.data.rows import Row
from rpft.data.token_bytes import TokenBytes
from rpft.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

__all__ = ["Encoder", "Row"]


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
        self.num_ids = len(tokenizer)
        self._takes_blanks = {
            token_id: not token.lstrip
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.lstrip or token.rstrip
        }
        """Added tokens that take blanks beside them, and whether their own text stands first."""
        # As the tokenizer's own call sets them; the call itself makes Python objects of every token.
        self._core: Tokenizer = tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self._core.encode_special_tokens = tokenizer.split_special_tokens
        begin = tokenizer.bos_token_id
        self._begin_id = begin if begin is not None and tokenizer("a").input_ids[0] == begin else None

    def encode(self, texts: list[str], spans: list[list[Span]], ends: list[bool]) -> list[Row]:
        """Tokenise texts; ``spans`` are each text's trained characters, ``ends`` asks for an end token.

        A token is trained when at least one of its characters is: the first token of an answer is then not
        lost to a blank of the prompt that it starts with. Blanks that a special token takes do not count for it.
        """
        table = self._token_bytes
        if table is None:
            encodings = self._core.encode_batch(texts, add_special_tokens=False)
            marked = [self._marked(*each) for each in zip(encodings, spans, strict=True)]
        else:
            encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
            marked = [self._counted(table, *each) for each in zip(encodings, texts, spans, strict=True)]
        return [self._row(*row, end) for row, end in zip(marked, ends, strict=True)]

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return TokenBytes.of(self._core)

    def _counted(
        self, table: TokenBytes, encoding: Encoding, text: str, spans: list[Span]
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(encoding.ids, dtype=np.int32)
        trained = table.trained(ids, text, spans)
        if trained is None:
            return self._marked(self._core.encode(text, add_special_tokens=False), spans)
        return ids, trained

    def _marked(self, encoding: Encoding, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, and whether each token has a character inside a span, by the offsets of tokens."""
        ids = np.array(encoding.ids, dtype=np.int32)
        trained = _trained(encoding, len(ids), spans)
        if self._takes_blanks:
            for place in np.flatnonzero(trained & np.isin(ids, list(self._takes_blanks))):
                # Blanks that such a token took from an answer do not make it the answer's: its own text decides.
                characters = encoding.token_to_chars(int(place))
                assert characters is not None, "a trained token has characters"
                own = characters[0] if self._takes_blanks[int(ids[place])] else characters[1] - 1
                trained[place] = any(start <= own < stop for start, stop in spans)
        return ids, trained

    def _row(self, ids: np.ndarray, trained: np.ndarray, end: bool) -> Row:
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


def _trained(encoding: Encoding, num_tokens: int, spans: list[Span]) -> np.ndarray:
    """Whether each token has a character inside a span.

    The tokens at the two ends of a span are asked for; all offsets are looked at only where a character at an end
    belongs to no token, for a Python object a token takes longer than the tokenisation of a short row.
    """
    trained = np.zeros(num_tokens, dtype=bool)
    for start, end in spans:
        if start >= end:
            continue
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None:
            return _overlaps(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2), spans)
        # A character may be several tokens, of which the first was given.
        while (following := encoding.token_to_chars(last + 1)) is not None and following[0] < end:
            last += 1
        trained[first : last + 1] = True
    return trained


def _overlaps(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Whether each token has a character inside a span. offsets: int64 [tokens, 2]."""
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    # Byte-level tokenizers that trim offsets report a token of blanks as empty, at the end of its blanks: it
    # then stands for what lies between the token before and there.
    empty = np.flatnonzero(starts == ends)
    empty = empty[empty > 0]
    if empty.size:
        starts[empty] = np.minimum(starts[empty], ends[empty - 1])
    trained = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        trained |= (starts < end) & (ends > start)
    return trained
