"""How many bytes of a text each token stands for, where tokens lose nothing: spans then need no offsets."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import models, pre_tokenizers

from rpft.data.render import Span

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLANK = "\u2581"
"""What stands for a blank in vocabularies that came from SentencePiece."""

_OTHERWISE = 1 << 30
"""For a token that stands for something else than its own text: more bytes than any text has."""

_ISOLATES = {"Digits", "Punctuation", "UnicodeScripts"}
_KEEPS_ALL = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
_BLANK_DECODERS = [
    {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_BLANK_NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}


class TokenBytes:
    """The bytes of every token, for tokenizers whose tokens can only have fewer of them than the text.

    Where the tokens of a text have as many bytes as the text, each stands for exactly those bytes: all that such
    a tokenizer can do otherwise (take blanks beside a special token, leave out what it does not know) makes them
    fewer. Asking a tokenizer for offsets takes a fifth of its time.
    """

    def __init__(self, lengths: np.ndarray, wants_nfc: bool) -> None:
        self._lengths = lengths
        self._wants_nfc = wants_nfc

    @staticmethod
    def of(core: Tokenizer) -> TokenBytes | None:
        """For a tokenizer; None where its tokens need not add up."""
        decoder, steps = _described(core.decoder), _steps(_described(core.pre_tokenizer), "pretokenizers")
        normalizers = _steps(_described(core.normalizer), "normalizers")
        model = core.model
        if not isinstance(model, models.BPE) or model.dropout:
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        if decoder.get("type") == "ByteLevel":
            if not (all(map(_keeps_all, steps)) and any(step["type"] == "ByteLevel" for step in steps)):
                return None
            if normalizers not in ([], [{"type": "NFC"}]):
                return None
            return TokenBytes(_table(core, _byte_level_length, _utf8_length), bool(normalizers))
        if _steps(decoder, "decoders") == _BLANK_DECODERS and normalizers == [_BLANK_NORMALIZER]:
            if not all(step["type"] == "Split" and _keeps_all(step) for step in steps):
                return None
            return TokenBytes(_table(core, _blank_length, _blank_length), False)
        return None

    def trained(self, ids: np.ndarray, text: str, spans: Iterable[Span]) -> np.ndarray | None:
        """Whether each token has a character inside a span, bool [tokens]; None where the bytes do not add up."""
        is_ascii = text.isascii()
        if not is_ascii and self._wants_nfc and not unicodedata.is_normalized("NFC", text):
            return None
        ends = self._lengths[ids].cumsum()
        if not ids.size or ends[-1] != (len(text) if is_ascii else len(text.encode("utf-8"))):
            return None
        trained = np.zeros(len(ids), dtype=bool)
        place, character = 0, 0
        for start, end in spans:
            if start >= end:
                continue
            if is_ascii:
                first, last = start, end
            else:
                first = place + len(text[character:start].encode("utf-8"))
                last = first + len(text[start:end].encode("utf-8"))
                place, character = last, end
            # From the token that holds the span's first byte to the one that holds its last.
            trained[ends.searchsorted(first, "right") : ends.searchsorted(last - 1, "right") + 1] = True
        return trained


def _described(part: Any) -> dict[str, Any]:
    """The settings of a part of a tokenizer, as its file has them."""
    return {} if part is None else json.loads(part.__getstate__())


def _steps(described: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if not described:
        return []
    if described.get("type") != "Sequence":
        return [described]
    return [step for inner in described[key] for step in _steps(inner, key)]


def _keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] in _ISOLATES or (step["type"] == "Split" and step["behavior"] in _KEEPS_ALL)


def _table(core: Tokenizer, length: Callable[[str], int], own_text: Callable[[str], int]) -> np.ndarray:
    """The bytes of every token of the vocabulary, and of those added to it, int64 [vocabulary]."""
    vocabulary = core.get_vocab(with_added_tokens=True)
    lengths = np.full(1 + max(vocabulary.values(), default=0), _OTHERWISE, dtype=np.int64)
    added = core.get_added_tokens_decoder()
    unknown = getattr(core.model, "unk_token", None)
    for token, token_id in vocabulary.items():
        if token_id not in added and token != unknown:
            lengths[token_id] = length(token)
    for token_id, token in added.items():
        if token.content != unknown:
            lengths[token_id] = own_text(token.content)
    return lengths


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


def _byte_level_length(token: str) -> int:
    """Each character stands for a byte."""
    return len(token) if _ALPHABET.issuperset(token) else _OTHERWISE


def _utf8_length(token: str) -> int:
    return len(token.encode("utf-8"))


def _blank_length(token: str) -> int:
    # A U+2581 that a text itself holds makes its tokens too few bytes.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return _utf8_length(token.replace(_BLANK, " "))
