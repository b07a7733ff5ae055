"""Read training data into objects, each with the place it came from: files, folders, patterns, hub data sets."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rpft.data.lines import COMPRESSIONS, LINE_READERS, parse_object
from rpft.data.tables import TABLE_READERS, hub_rows
from rpft.errors import UserError

Format = Literal["auto", "messages", "alpaca", "prompt_completion", "text", "tokens", "preference"]

HUB_PREFIX = "hub:"
"""What a path starts with that names a data set of the hub."""

ENDINGS = (*LINE_READERS, *TABLE_READERS)
"""Of files that can be read; those of lines may be compressed."""


@dataclass(frozen=True)
class Source:
    """One entry of the training data.

    path: a file, a folder (all files below it that can be read, by name), a pattern with ``*``, or
    ``hub:owner/name``. format "auto" goes by the keys of the first row. ``max_rows`` keeps only the first rows.
    weight: times that each row stands in an epoch; of a fraction, so large a share of the rows, drawn by the
    run's seed. columns: key of the format to the name that it has in the data. config, split, revision and
    streaming are those of a hub data set.
    """

    path: str
    format: Format = "auto"
    max_rows: int | None = None
    weight: float = 1.0
    columns: Mapping[str, str] | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    @property
    def is_hub(self) -> bool:
        return self.path.startswith(HUB_PREFIX)


@dataclass(frozen=True)
class Unread:
    """A row before it is parsed: the bytes of its line, or an object that its file holds as such.

    where: ``path:line``, or ``path, item i of the list``, ``path, row i``, counted from 1.
    """

    where: str
    content: bytes | dict[str, Any]


@dataclass(frozen=True)
class RawRow:
    """A row as it stands in the data, and where."""

    where: str
    value: dict[str, Any]


def read_rows(source: Source) -> Iterator[RawRow]:
    """Yield the rows of a source in its order; raises UserError for what cannot be read."""
    return (parse_unread(row, source.columns) for row in unread_rows(source))


def parse_unread(row: Unread, columns: Mapping[str, str] | None) -> RawRow:
    """The object of a row, its columns under the names of the format."""
    value = row.content if isinstance(row.content, dict) else parse_object(row.content, row.where)
    return RawRow(row.where, value if columns is None else _rename(value, columns, row.where))


def unread_rows(source: Source) -> Iterator[Unread]:
    """The rows of a source in its order, as far as they need not be parsed to be told apart."""
    stream = _hub(source) if source.is_hub else _files(source)
    empty = True
    for where, content in islice(stream, source.max_rows):
        empty = False
        yield Unread(where, content)
    if empty and source.max_rows != 0:
        raise UserError(f"{source.path} holds no rows: write one JSON object a line, or remove it from data.")


def files_of(source: Source) -> list[Path]:
    """The files of a source, in the order in which they are read; UserError where there are none."""
    path = Path(source.path)
    if path.is_dir():
        found = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and _ending(file) is not None
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not found:
            raise UserError(
                f"{path} is a folder without a file that can be read (data.train / data.eval); files that can end"
                f" in {', '.join(ENDINGS)}."
            )
        return found
    if path.exists():
        return [path]
    if glob.has_magic(source.path):
        found = sorted(Path(name) for name in glob.glob(source.path, recursive=True) if Path(name).is_file())
        if found:
            return found
        raise UserError(f"{source.path}: no file matches this pattern (looked in {Path.cwd()}).")
    raise UserError(
        f"{path} does not exist (looked in {Path.cwd()}): correct the path in data.train / data.eval. "
        f"A data set of the hub is written {HUB_PREFIX}owner/name."
    )


def _files(source: Source) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    for path in files_of(source):
        ending = _ending(path)
        if ending in TABLE_READERS:
            yield from TABLE_READERS[ending](path)
        else:
            # A name without an ending that is known is taken for lines of JSON, whose errors say what it is not.
            yield from LINE_READERS[ending or ".jsonl"](path)


def _hub(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    name = source.path.removeprefix(HUB_PREFIX)
    return hub_rows(name, source.config, source.split, source.revision, source.streaming)


def _ending(path: Path) -> str | None:
    """The ending that says how a file is read, without that of its compression; None for others."""
    name = path.name.lower()
    for compression in COMPRESSIONS:
        if name.endswith(compression):
            inner = Path(name.removesuffix(compression)).suffix
            return inner if inner in LINE_READERS else None
    ending = Path(name).suffix
    return ending if ending in ENDINGS else None


def _rename(value: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    missing = sorted(set(columns.values()) - value.keys())
    if missing:
        raise UserError(
            f"{where}: no column {', '.join(missing)}, which data's `columns` names; this row has"
            f" {', '.join(sorted(value)) or '(none)'}."
        )
    taken = set(columns.values())
    # A column that is mapped away does not also stand under its own name; one that is in the way of a key goes.
    kept = {key: item for key, item in value.items() if key not in taken and key not in columns}
    return kept | {key: value[column] for key, column in columns.items()}
