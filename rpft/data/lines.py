"""Read files that are lines of text: JSON, JSON lines, CSV, TSV and plain text, compressed or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rpft.errors import UserError

COMPRESSIONS = (".gz", ".zst")

Rows = Iterator[tuple[str, "bytes | dict[str, Any]"]]
"""(where a row stands, the bytes of its JSON or its object)."""

_BEGIN_MARK = b"\xef\xbb\xbf"


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line, without a mark at the begin of the file; line ends are kept.

    Bytes are split on \\n alone: text-mode reading would follow the locale's encoding, and str.splitlines would
    cut a row at a U+2028 that stands inside a string.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(_BEGIN_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, number, error) from error
    except OSError as error:
        if path.suffix.lower() not in COMPRESSIONS:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
        raise _broken(path, number, error) from error


def _broken(path: Path, number: int, error: Exception) -> UserError:
    return UserError(
        f"{path}: the compressed file is broken after line {number} ({error}). Fetch or compress it again."
    )


def _open(path: Path) -> BinaryIO:
    ending = path.suffix.lower()
    if ending == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if ending == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise UserError(
                f"{path}: reading .zst needs the package pyarrow: pip install pyarrow, or decompress the file."
            ) from error
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 20)
    return path.open("rb")


def _json_lines(path: Path) -> Rows:
    for number, line in lines_of(path):
        if line.strip():
            yield f"{path}:{number}", line


def _json_list(path: Path) -> Rows:
    content = b"".join(line for _, line in lines_of(path))
    if not content.strip():
        return
    values = parse_json(content, str(path))
    if not isinstance(values, list):
        raise UserError(
            f"{path}: a .json file must be one list of objects, this one is {kind_of(values)}. "
            "Put the objects into [ ], or write one object a line and name the file .jsonl."
        )
    for number, value in enumerate(values, start=1):
        where = f"{path}, item {number} of the list"
        yield where, as_object(value, where)


def _text(path: Path) -> Rows:
    for number, line in lines_of(path):
        where = f"{path}:{number}"
        text = decode(line, where).rstrip("\r\n")
        if text.strip():
            yield where, {"text": text}


def _table_of(delimiter: str) -> Callable[[Path], Rows]:
    def rows(path: Path) -> Rows:
        # The limit belongs to the process; a cell may be as long as any other text.
        csv.field_size_limit(2**31 - 1)
        decoded = (decode(line, f"{path}:{number}") for number, line in lines_of(path))
        reader = csv.reader(decoded, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        start = 1
        try:
            for cells in reader:
                where, start = f"{path}:{start}", reader.line_num + 1
                if not cells:
                    continue
                if header is None:
                    header = _header(cells, where)
                elif len(cells) != len(header):
                    raise UserError(
                        f"{where}: {len(cells)} cells where the header has {len(header)}"
                        f" ({', '.join(header)}). Put cells that hold {delimiter!r} or a line end in double"
                        " quotes."
                    )
                else:
                    yield where, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise UserError(f"{path}:{start}: not a row of a table ({error}). Correct it.") from error

    return rows


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{where}: the first line must name every column, each once; it has {', '.join(cells)}.")
    return names


LINE_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".csv": _table_of(","),
    ".tsv": _table_of("\t"),
    ".txt": _text,
}


def decode(content: bytes, where: str) -> str:
    """UTF-8 text; UserError names the line of a byte that is not."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        within = f", line {line}" if line > 1 or content.count(b"\n") > 1 else ""
        raise UserError(
            f"{where}{within}: byte 0x{content[error.start]:02x} at position {error.start} is not UTF-8. "
            "Save the file as UTF-8 text."
        ) from error


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line."""
    return as_object(parse_json(content.rstrip(b"\r\n"), where), where)


def parse_json(content: bytes, where: str) -> Any:
    """The value of JSON text, as it is written: a repeated key keeps its last value."""
    text = decode(content, where)
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


def as_object(value: Any, where: str) -> dict[str, Any]:
    """``value`` if it is an object, else UserError."""
    if isinstance(value, dict):
        return value
    advice = "A file that is one list must be named .json. " if isinstance(value, list) else ""
    raise UserError(
        f"{where}: a row must be a JSON object {{...}}, this one is {kind_of(value)}. {advice}".strip()
    )


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), "a number")
