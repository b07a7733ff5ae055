"""Read what is kept in columns: parquet and arrow files, and data sets of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rpft.errors import UserError

Rows = Iterator[tuple[str, "dict[str, Any]"]]

_BATCH_ROWS = 1024


def _parquet(path: Path) -> Rows:
    arrow = _pyarrow(path)
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _numbered(file.iter_batches(batch_size=_BATCH_ROWS), path)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, "parquet", error) from error


def _arrow(path: Path) -> Rows:
    """The file format and the stream format, which `datasets` writes, have the same ending."""
    arrow = _pyarrow(path)
    try:
        with arrow.memory_map(str(path)) as mapped:
            try:
                file = arrow.ipc.open_file(mapped)
            except arrow.ArrowInvalid:
                mapped.seek(0)
                yield from _numbered(arrow.ipc.open_stream(mapped), path)
            else:
                yield from _numbered((file.get_batch(i) for i in range(file.num_record_batches)), path)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, "arrow", error) from error


TABLE_READERS: dict[str, Callable[[Path], Rows]] = {".parquet": _parquet, ".arrow": _arrow}


def hub_rows(name: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Rows:
    """The rows of a data set of the hub, or of a folder that `datasets` knows; UserError where it is not got."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"hub:{name}: data sets of the hub need the package datasets: pip install datasets"
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
        for number, row in enumerate(rows, start=1):
            yield f"hub:{name} ({split}), row {number}", dict(row)
    except UserError:
        raise
    except Exception as error:
        # Whatever the network, the hub or a data set's own files raise: it is about this entry.
        said = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"hub:{name}: the data set could not be read ({type(error).__name__}: {said}). Check its name,"
            " `config`, `split` and `revision`, the network, and for a gated one your access token."
        ) from error


def _numbered(batches: Any, path: Path) -> Rows:
    number = 0
    for batch in batches:
        # Not pandas: it would turn whole numbers with a null among them into floats.
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise UserError(f"{path}: reading {path.suffix} needs the package pyarrow: pip install pyarrow") from error
    return pyarrow


def _unreadable(path: Path, kind: str, error: Exception) -> UserError:
    return UserError(f"{path}: not a whole {kind} file ({str(error).splitlines()[0]}). Fetch or write it again.")
