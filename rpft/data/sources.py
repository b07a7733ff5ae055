"""Read a training file into JSON objects, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rpft.errors import UserError

Format = Literal["auto", "messages", "alpaca", "text"]


@dataclass(frozen=True)
class Source:
    """One training file: ``.jsonl`` (an object a line) or ``.json`` (one list of objects).

    ``format`` "auto" takes the format from the keys of the file's first row. ``max_rows`` keeps only the
    first rows of the file.
    """

    path: str
    format: Format = "auto"
    max_rows: int | None = None


@dataclass(frozen=True)
class RawRow:
    """A JSON object as it stands in the file, and where: ``path:line`` or ``path, item i of the list``."""

    where: str
    value: dict[str, Any]


def read_rows(source: Source) -> Iterator[RawRow]:
    """Yield the rows of a source in file order; raises UserError for what cannot be read."""
    path = Path(source.path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a .jsonl or .json file inside it (data.train / data.eval).")
    if not path.exists():
        raise UserError(
            f"{path} does not exist (looked in {Path.cwd()}): correct the path in data.train / data.eval. "
            "Only files are read; download a hub data set to a .jsonl file first."
        )
    rows = _rows_of_list(path) if path.suffix.lower() == ".json" else _rows_of_lines(path)
    empty = True
    for row in islice(rows, source.max_rows):
        empty = False
        yield row
    if empty and source.max_rows != 0:
        raise UserError(f"{path} holds no rows: write one JSON object a line, or remove the file from data.")


def _rows_of_lines(path: Path) -> Iterator[RawRow]:
    # Bytes are split on \n alone: text-mode reading would follow the locale's encoding, and str.splitlines
    # would cut a row at a U+2028 that stands inside a string.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                where = f"{path}:{number}"
                yield RawRow(where, _as_object(_parse(line.rstrip(b"\r\n"), where), where))


def _rows_of_list(path: Path) -> Iterator[RawRow]:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        return
    values = _parse(content, str(path))
    if not isinstance(values, list):
        raise UserError(
            f"{path}: a .json file must be one list of objects, this one is {_kind(values)}. "
            "Put the objects into [ ], or write one object a line and name the file .jsonl."
        )
    for number, value in enumerate(values, start=1):
        where = f"{path}, item {number} of the list"
        yield RawRow(where, _as_object(value, where))


def _parse(content: bytes, where: str) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        within = f", line {line}" if b"\n" in content else ""
        raise UserError(
            f"{where}{within}: byte 0x{content[error.start]:02x} at position {error.start} is not UTF-8. "
            "Save the file as UTF-8 text."
        ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        within = f"line {error.lineno}, " if error.lineno > 1 else ""
        advice = "Correct it, or remove the row."
        if error.msg == "Extra data" and where == f"{where.removesuffix('.json')}.json":
            advice = "A file with one object a line must be named .jsonl."
        raise UserError(f"{where}: not JSON ({within}column {error.colno}: {error.msg}). {advice}") from error
    except (ValueError, RecursionError) as error:
        # An integer of thousands of digits, or brackets nested deeper than the parser goes.
        raise UserError(f"{where}: JSON that cannot be read ({error}). Remove the row.") from error


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    advice = "A file that is one list must be named .json. " if isinstance(value, list) else ""
    raise UserError(f"{where}: a row must be a JSON object {{...}}, this one is {_kind(value)}. {advice}".strip())


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), "a number")
