"""The rows of a run: tokenised, split, packed, and in the order in which steps take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rpft.data.batches import BatchOrder, Microbatch, make_microbatches, pack_rows
from rpft.data.dataset import Dataset, DataSettings, load_dataset
from rpft.data.padding import choose_pad_lengths
from rpft.data.sources import Source
from rpft.errors import UserError
from rpft.model.layout import align
from rpft.recipe.schema import Recipe

PAD_TO_MULTIPLE = 8
"""Lines are padded to a multiple of this: few distinct shapes, which kernels and caches like."""

_FEW_LENGTHS = 8
"""Lengths to which lines are padded where layers run as graphs: each is compiled for, 5 to 20 seconds."""

_FEW_LENGTHS_MULTIPLE = 64
"""What these are multiples of, as the tiles of kernels are, unless all lines are shorter."""


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

    @property
    def longest(self) -> int:
        """Tokens of the longest line of a microbatch, padding included."""
        return self.pad_lengths[-1]

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of ``step``, counted from 1."""
        groups = [self.items[index] for index in self.order.items(step - 1)]
        return make_microbatches(self.train, groups, self.micro_batch_size, self.pad_id, self.pad_lengths)

    def evaluation(self) -> list[Microbatch]:
        """All evaluation rows, shortest first, so that little is padded."""
        data = self.eval
        assert data is not None
        groups = [(i,) for i in sorted(range(len(data.rows)), key=lambda i: len(data.rows[i].ids))]
        return make_microbatches(data, groups, self.micro_batch_size, self.pad_id, self.pad_lengths)


def load_data(recipe: Recipe, folder: Path, few_shapes: bool, positions: int | None) -> RunData:
    """Tokenises the recipe's rows with the tokenizer in ``folder``.

    ``few_shapes``: whether lines are padded to few lengths. ``positions``: those that the model has, if limited.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"model.path {folder}: no tokenizer that transformers can load ({type(error).__name__}: {said});"
            " tokenizer.json and tokenizer_config.json belong beside the weights"
        ) from error
    spec = recipe.data
    template = None
    if spec.chat_template is not None:
        try:
            template = Path(spec.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template {spec.chat_template}: {error}") from error
    settings = DataSettings(spec.max_seq_len, spec.truncation, spec.train_on, spec.system_role, template)

    def sources(entries: Sequence[Any]) -> list[Source]:
        return [Source(entry.path, entry.format, entry.max_rows) for entry in entries]

    train = load_dataset(sources(spec.train), tokenizer, settings)
    held_out = load_dataset(sources(spec.eval), tokenizer, settings) if spec.eval else None
    if spec.eval_fraction:
        train, held_out = _hold_out(train, spec.eval_fraction, recipe.train.seed)
    if spec.packing:
        items = pack_rows(train.rows, spec.max_seq_len)
    else:
        items = [(index,) for index in range(len(train.rows))]
    settings_train = recipe.train
    rows_per_step = settings_train.micro_batch_size * settings_train.gradient_accumulation_steps
    epochs = settings_train.num_epochs or 1
    order = BatchOrder(len(items), rows_per_step, settings_train.seed, epochs, settings_train.max_steps)
    pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    lines = [sum(len(train.rows[i].ids) for i in group) for group in items]
    lines += [len(row.ids) for row in held_out.rows] if held_out else []
    lengths = _pad_lengths(lines, few_shapes, positions)
    return RunData(tokenizer, train, held_out, items, order, settings_train.micro_batch_size, pad_id, lengths)


def _pad_lengths(lines: Sequence[int], few_shapes: bool, positions: int | None) -> Sequence[int]:
    """To which lengths lines with so many tokens are padded."""
    longest = max(lines)
    if not few_shapes:
        return range(PAD_TO_MULTIPLE, align(longest, PAD_TO_MULTIPLE) + 1, PAD_TO_MULTIPLE)
    coarse = align(longest, _FEW_LENGTHS_MULTIPLE)
    fits = longest >= _FEW_LENGTHS_MULTIPLE and (positions is None or coarse <= positions)
    return choose_pad_lengths(lines, _FEW_LENGTHS_MULTIPLE if fits else PAD_TO_MULTIPLE, _FEW_LENGTHS)


def _hold_out(data: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Splits rows by a draw from ``seed`` into training and evaluation rows, at least one of each."""
    count = len(data.rows)
    if count < 2:
        raise UserError("data.eval_fraction: at least two rows are needed to hold one out")
    drawn = np.argsort(np.random.Philox(key=seed % 2**64).random_raw(count), kind="stable")
    size = min(count - 1, max(1, round(fraction * count)))
    chosen = set(drawn[:size].tolist())
    train = [row for i, row in enumerate(data.rows) if i not in chosen]
    return Dataset(train, data.reports), Dataset([data.rows[i] for i in sorted(chosen)], data.reports)
