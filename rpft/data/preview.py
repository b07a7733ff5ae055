"""What a person should see of the data before training: lengths, packing, duplicates, the strangest rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpft.data.dataset import Dataset
from rpft.data.loader import DataSettings, RowLoader
from rpft.data.packing import pack_lengths, packing_efficiency
from rpft.data.report import SourceReport
from rpft.data.rows import Row, Rows, lengths_of
from rpft.data.selection import count_repeated
from rpft.data.sources import Source, unread_rows

_MOST_LOOKED_AT = 20_000
_BINS = 12
_FEWEST_TOKENS_OF_A_LOOP = 32


@dataclass(frozen=True)
class Run:
    """Tokens in a row that are alike. special: a token of the tokenizer's own, such as an end of turn."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class StrangeRow:
    """A row that stands out. where: its place in the data."""

    where: str
    why: str
    row: Row


@dataclass(frozen=True)
class Preview:
    """Figures of the training rows. histogram: (fewest tokens, most tokens, rows) of each bin."""

    histogram: list[tuple[int, int, int]]
    num_packs: int
    efficiency: float
    repeated: int
    looked_at: int
    strangest: list[StrangeRow]


def preview(dataset: Dataset, sources: Sequence[Source], max_seq_len: int) -> Preview:
    """The figures of a data set that ``load_dataset`` gave for ``sources``."""
    lengths = lengths_of(dataset.rows)
    num_packs = len(pack_lengths(lengths, max_seq_len))
    step = max(1, -(-len(lengths) // _MOST_LOOKED_AT))
    looked_at = list(range(0, len(lengths), step))
    return Preview(
        _histogram(lengths),
        num_packs,
        packing_efficiency(lengths, num_packs, max_seq_len),
        count_repeated(dataset.rows),
        len(looked_at),
        _strangest(dataset, sources, looked_at),
    )


def first_row(source: Source, tokenizer: Any, settings: DataSettings) -> tuple[str, Row] | None:
    """(place, row) of the first row of a source that is trained on, if it is among the first few."""
    loader = RowLoader(tokenizer, settings)
    for ordinal, unread in enumerate(unread_rows(source)):
        kept = loader.rows([unread], ordinal, source, SourceReport(source.path, source.format))
        if kept:
            return unread.where, kept[0][1]
        if ordinal == 99:
            break
    return None


def runs_of(row: Row, tokenizer: Any) -> list[Run]:
    """The text of a row, cut where tokens stop being trained and around special ones.

    The tokens of one character are trained alike, so it is whole.
    """
    special = set(tokenizer.all_special_ids)
    ids, trained = row.ids.tolist(), row.trained.tolist()
    runs: list[Run] = []
    first = 0
    for end in range(1, len(ids) + 1):
        alone = ids[first] in special
        if end < len(ids) and not alone and ids[end] not in special and trained[end] == trained[first]:
            continue
        runs.append(Run(_text(ids, first, end, tokenizer), trained[first], alone))
        first = end
    return runs


def _text(ids: list[int], first: int, end: int, tokenizer: Any) -> str:
    # Some tokenizers leave the blank in front of the first token out, so a token stands before it.
    before = ids[max(0, first - 1) : first]
    lead = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    whole = tokenizer.decode(before + ids[first:end], clean_up_tokenization_spaces=False)
    if whole.startswith(lead):
        return whole[len(lead) :]
    return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    longest = int(lengths.max())
    width = max(1, -(-longest // _BINS))
    counts = np.bincount((lengths - 1) // width)
    return [(i * width + 1, min((i + 1) * width, longest), int(count)) for i, count in enumerate(counts)]


def _strangest(dataset: Dataset, sources: Sequence[Source], looked_at: list[int]) -> list[StrangeRow]:
    """One row for each way in which it stands out, no row twice."""
    rows = [dataset.rows[index] for index in looked_at]
    vocabulary = 1 + max(int(row.ids.max()) for row in rows)
    seen = np.zeros(vocabulary, dtype=np.int64)
    for row in rows:
        seen += np.bincount(row.ids, minlength=vocabulary)
    surprise = -np.log2(np.maximum(seen, 1) / seen.sum())
    sizes = np.array([len(row.ids) for row in rows])
    trained = np.array([int(row.trained.sum()) for row in rows])
    # A short row says little about repetition: 2 is more than any share.
    distinct = np.array(
        [
            len(np.unique(row.ids)) / len(row.ids) if len(row.ids) >= _FEWEST_TOKENS_OF_A_LOOP else 2.0
            for row in rows
        ]
    )
    rare = np.array([float(surprise[row.ids].mean()) for row in rows])
    ways = [
        (-sizes, lambda i: f"the longest: {sizes[i]:,} tokens"),
        (trained, lambda i: f"the least to train: {trained[i]:,} of {sizes[i]:,} tokens"),
        (
            distinct,
            lambda i: f"the most repetitive: {distinct[i]:.0%} of {sizes[i]:,} tokens are different",
        ),
        (-rare, lambda i: f"the rarest tokens: {rare[i]:.1f} bits a token, {rare.mean():.1f} on average"),
        (-trained / sizes, lambda i: f"the least prompt: {sizes[i] - trained[i]:,} of {sizes[i]:,} tokens"),
    ]
    chosen: dict[int, str] = {}
    for order, why in ways:
        place = next((int(i) for i in np.argsort(order, kind="stable") if int(i) not in chosen), None)
        if place is not None and order[place] < 2.0:
            chosen[place] = why(place)
    places = _places(dataset, sources, [looked_at[i] for i in chosen])
    return [StrangeRow(places[looked_at[i]], why, rows[i]) for i, why in chosen.items()]


def _places(dataset: Dataset, sources: Sequence[Source], indices: list[int]) -> dict[int, str]:
    """Where rows stand in their files: only their numbers are kept, so the files are read once more up to them."""
    assert isinstance(dataset.rows, Rows)
    origins = {index: dataset.rows.origin(index) for index in indices}
    found: dict[tuple[int, int], str] = {}
    for number, source in enumerate(sources):
        wanted = {ordinal for block, ordinal in origins.values() if block == number}
        if not wanted:
            continue
        last = max(wanted)
        for ordinal, unread in enumerate(unread_rows(source)):
            if ordinal in wanted:
                found[number, ordinal] = unread.where
            if ordinal == last:
                break
    return {index: found[origin] for index, origin in origins.items()}
