"""The rows of a run: tokenised, split, packed, and in the order in which steps take them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rpft.data.batches import BatchOrder, Microbatch, lay_out, make_microbatches
from rpft.data.dataset import Dataset, DataSettings, Loading, load_dataset
from rpft.data.packing import choose_microbatches, pack_lengths
from rpft.data.padding import choose_pad_lengths
from rpft.data.progress import LoadingProgress
from rpft.data.rows import ChosenRows, Row, lengths_of
from rpft.data.selection import count_shared, hold_out, weigh
from rpft.data.sources import Source
from rpft.data.templates import read_template
from rpft.errors import UserError
from rpft.host import available_cores
from rpft.model.layout import align
from rpft.recipe.schema import Recipe
from rpft.recipe.sections.data import Data
from rpft.recipe.sections.data import Source as SourceEntry

PAD_TO_MULTIPLE = 8
"""Lines are padded to a multiple of this: few distinct shapes, which kernels and caches like."""

_FEW_LENGTHS = 8
"""Lengths to which lines are padded where layers run as graphs: each is compiled for, 5 to 20 seconds."""

_FEW_LENGTHS_MULTIPLE = 64
"""What these are multiples of, as the tiles of kernels are, unless all lines are shorter."""

_MOST_PROCESSES = 16


@dataclass
class RunData:
    """The rows of a run and the order in which steps take them."""

    tokenizer: Any
    train: Dataset
    eval: Dataset | None
    items: list[tuple[int, ...]]
    """Groups of training rows that share a line of a microbatch: one row each, or packs."""
    order: BatchOrder
    micro_batch_size: int
    pad_id: int
    pad_lengths: Sequence[int]
    """Lengths to which lines are padded, ascending."""
    few_shapes: bool
    """Whether all microbatches have as many lines."""
    notes: list[str]
    """What a person should know of the rows, beside the reports."""

    @property
    def longest(self) -> int:
        """Tokens of the longest line of a microbatch, padding included."""
        return self.pad_lengths[-1]

    @cached_property
    def typical_row_tokens(self) -> int:
        """Rows of about so many tokens would take the attention that the training rows take; a power of two."""
        lengths = np.asarray(lengths_of(self.train.rows), float)
        return 1 << (int((lengths**2).sum() / lengths.sum()) - 1).bit_length()

    @cached_property
    def digest(self) -> str:
        """Of the training rows' ids and trained tokens, in the order and the packs in which steps draw on them."""
        digest, rows = hashlib.sha256(), self.train.rows
        for group in self.items:
            for index in group:
                row = rows[index]
                digest.update(len(row.ids).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(row.ids).data)
                digest.update(np.ascontiguousarray(row.trained).data)
        return digest.hexdigest()

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of ``step``, counted from 1."""
        groups = [self.items[index] for index in self.order.items(step - 1)]
        lengths = [sum(len(self.train.rows[row].ids) for row in group) for group in groups]
        chosen = choose_microbatches(lengths, self.micro_batch_size, self.pad_lengths, self.few_shapes)
        microbatches = [[groups[index] for index in indices] for indices in chosen]
        return lay_out(self.train, microbatches, self.pad_id, self.pad_lengths)

    def evaluation(self) -> list[Microbatch]:
        """All evaluation rows, shortest first, so that little is padded."""
        data = self.eval
        assert data is not None
        groups = [(int(i),) for i in np.argsort(lengths_of(data.rows), kind="stable")]
        return make_microbatches(data, groups, self.micro_batch_size, self.pad_id, self.pad_lengths)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``; UserError where transformers cannot load one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"model.path {folder}: no tokenizer that transformers can load ({type(error).__name__}: {said});"
            " tokenizer.json and tokenizer_config.json belong beside the weights"
        ) from error


def use_template(tokenizer: Any, spec: Data) -> Any:
    """``tokenizer`` as it goes with the trained model: with the chat template that the recipe gives its rows."""
    if spec.chat_template is not None:
        tokenizer.chat_template = read_template(spec.chat_template)
    return tokenizer


def data_settings(spec: Data) -> DataSettings:
    """How the recipe has rows become tokens; UserError where its chat template cannot be read."""
    return DataSettings(
        spec.max_seq_len,
        spec.truncation,
        spec.train_on,
        spec.system_role,
        None if spec.chat_template is None else read_template(spec.chat_template),
        dict(spec.template_kwargs) if spec.template_kwargs is not None else None,
        spec.template_date,
    )


def data_sources(entries: Sequence[SourceEntry]) -> list[Source]:
    """The entries of data.train or data.eval."""
    return [
        replace(Source(**entry.model_dump()), columns=dict(entry.columns) if entry.columns is not None else None)
        for entry in entries
    ]


def data_loading(spec: Data, progress: LoadingProgress) -> Loading:
    """With how many processes and which cache the recipe's rows are loaded."""
    processes = spec.processes or min(_MOST_PROCESSES, available_cores())
    return Loading(processes, os.path.expanduser(spec.token_cache), progress)


def load_rows(spec: Data, tokenizer: Any, settings: DataSettings) -> tuple[Dataset, Dataset | None]:
    """The rows of data.train, and of data.eval where there are any; how far they are is shown meanwhile."""
    with LoadingProgress() as progress:
        loading = data_loading(spec, progress)
        train = load_dataset(data_sources(spec.train), tokenizer, settings, loading)
        held_out = load_dataset(data_sources(spec.eval), tokenizer, settings, loading) if spec.eval else None
    return train, held_out


def load_data(recipe: Recipe, folder: Path, few_shapes: bool, positions: int | None) -> RunData:
    """Tokenises the recipe's rows with the tokenizer in ``folder``.

    ``few_shapes``: whether lines are padded to few lengths. ``positions``: those that the model has, if limited.
    """
    spec, settings_train = recipe.data, recipe.train
    tokenizer = load_tokenizer(folder)
    data, held_out = load_rows(spec, tokenizer, data_settings(spec))
    _refuse_pairs(data, held_out)
    train, source_of = data, np.repeat(np.arange(len(data.reports)), [r.trained_rows for r in data.reports])
    if spec.eval_fraction or spec.eval_rows:
        train_rows, eval_rows = split_rows(spec, data.rows, settings_train.seed)
        train, held_out = Dataset(train_rows, data.reports), Dataset(eval_rows, data.reports)
        source_of = source_of[train_rows.indices]
    taken = weigh(source_of, [entry.weight for entry in spec.train], settings_train.seed)
    lengths = lengths_of(train.rows)[taken]
    if spec.packing:
        rows = taken.tolist()
        items = [tuple(rows[i] for i in pack) for pack in pack_lengths(lengths, spec.max_seq_len)]
    else:
        items = [(index,) for index in taken.tolist()]
    rows_per_step = settings_train.microbatch_rows * settings_train.gradient_accumulation_steps
    epochs = settings_train.num_epochs or 1
    order = BatchOrder(len(items), rows_per_step, settings_train.seed, epochs, settings_train.max_steps)
    pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    lines = _line_lengths(lengths_of(train.rows), items)
    if held_out is not None:
        lines = np.concatenate([lines, lengths_of(held_out.rows)])
    return RunData(
        tokenizer,
        train,
        held_out,
        items,
        order,
        settings_train.microbatch_rows,
        pad_id,
        _pad_lengths(lines, few_shapes, positions),
        few_shapes,
        _notes(spec, data, train, held_out, taken),
    )


def split_rows(spec: Data, rows: Sequence[Row], seed: int) -> tuple[ChosenRows, ChosenRows]:
    """(training rows, rows that data.eval_fraction or data.eval_rows holds out of them)."""
    train_rows, eval_rows = hold_out(len(rows), _num_held_out(spec, len(rows)), seed)
    return ChosenRows(rows, train_rows), ChosenRows(rows, eval_rows)


def _refuse_pairs(*data: Dataset | None) -> None:
    for report in (report for part in data if part is not None for report in part.reports):
        if report.format == "preference":
            raise UserError(
                f"{report.path} holds preference pairs, which can be looked at with `rpft data` and not yet be"
                " trained on. To train on the preferred answers, give their column as messages or completion:"
                " `format: messages` with `columns: {messages: chosen}`."
            )


def _num_held_out(spec: Data, num_rows: int) -> int:
    """Rows to hold out; UserError where that leaves none to train on."""
    key = "data.eval_rows" if spec.eval_rows is not None else "data.eval_fraction"
    if num_rows < 2:
        raise UserError(f"{key}: at least two rows are needed to hold one out")
    if spec.eval_rows is not None:
        if spec.eval_rows >= num_rows:
            raise UserError(
                f"{key} is {spec.eval_rows}, and there are {num_rows} rows in all: at most {num_rows - 1}"
            )
        return spec.eval_rows
    return min(num_rows - 1, max(1, round(spec.eval_fraction * num_rows)))


def _line_lengths(lengths: np.ndarray, items: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Tokens of each line."""
    counts = np.array([len(item) for item in items])
    rows = np.fromiter((row for item in items for row in item), dtype=np.int64, count=int(counts.sum()))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.add.reduceat(lengths[rows], starts, dtype=np.int64)


def _pad_lengths(lines: Sequence[int] | np.ndarray, few_shapes: bool, positions: int | None) -> Sequence[int]:
    """To which lengths lines with so many tokens are padded."""
    longest = int(max(lines))
    if not few_shapes:
        return range(PAD_TO_MULTIPLE, align(longest, PAD_TO_MULTIPLE) + 1, PAD_TO_MULTIPLE)
    coarse = align(longest, _FEW_LENGTHS_MULTIPLE)
    fits = longest >= _FEW_LENGTHS_MULTIPLE and (positions is None or coarse <= positions)
    return choose_pad_lengths(lines, _FEW_LENGTHS_MULTIPLE if fits else PAD_TO_MULTIPLE, _FEW_LENGTHS)


def _notes(spec: Data, data: Dataset, train: Dataset, held_out: Dataset | None, taken: np.ndarray) -> list[str]:
    lines = [
        f"data {report.path}: {count} {what} (first: {report.places[what][0]})"
        for report in data.reports
        for what, count in report.notes.items()
    ]
    if any(entry.weight != 1 for entry in spec.train):
        lines.append(f"data: weights make {len(taken):,} rows an epoch of {len(train.rows):,}")
    if held_out is not None:
        if spec.eval_fraction or spec.eval_rows:
            lines.append(f"data: {len(held_out.rows):,} rows held out for evaluation")
        shared = count_shared(train.rows, held_out.rows)
        if shared:
            lines.append(
                f"data: {shared:,} of {len(held_out.rows):,} evaluation rows are also training rows, so the"
                " evaluation loss is too low"
            )
    return lines
