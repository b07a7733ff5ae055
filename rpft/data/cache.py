"""Tokens of large sources kept on disk, under a key of everything that they depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rpft import host
from rpft.data.loader import DataSettings
from rpft.data.report import SourceReport
from rpft.data.rows import Block, BlockWriter, map_block
from rpft.data.sources import Source, files_of
from rpft.errors import UserError
from rpft.files import digest, sync

CACHED_FROM_BYTES = 16 << 20
"""Size of a source from which its tokens are worth a place on the disk."""

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def default_folder() -> Path:
    """Where tokens are kept unless the recipe names a folder."""
    return host.cache_folder("tokens")


def is_large(source: Source) -> bool:
    """Whether a source is of files that are large enough for the default cache."""
    return not source.is_hub and sum(path.stat().st_size for path in files_of(source)) >= CACHED_FROM_BYTES


def cache_key(source: Source, tokenizer: Any, settings: DataSettings) -> str | None:
    """A name for the tokens of a source; None where the source cannot be told to be the same later.

    It covers the files (path, size, time of change and samples of the content), the source's and the data's
    settings, tokenizer and template, and the code and libraries that make tokens of them.
    """
    if source.is_hub:
        if source.revision is None or len(source.revision) != 40 or source.streaming:
            return None  # A branch moves.
        files: list[Any] = []
    else:
        files = [_file_mark(path) for path in files_of(source)]
    parts = {
        "source": {**asdict(source), "columns": dict(source.columns) if source.columns else None, "weight": None},
        "files": files,
        "settings": asdict(settings),
        "tokenizer": _tokenizer_mark(tokenizer),
        "code": _code_mark(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def read_cached(folder: Path, key: str) -> tuple[Block, SourceReport] | None:
    """What was kept under a key, mapped; None where nothing whole is there."""
    place = folder / key
    try:
        report = SourceReport(**json.loads((place / "report.json").read_text(encoding="utf-8")))
        block = map_block(place)
    except (OSError, ValueError, TypeError):
        return None
    return (block, report) if len(block.ids) == report.tokens else None


def write_cached(
    folder: Path, key: str, blocks: Iterable[tuple[Block, SourceReport]], report: SourceReport
) -> Block:
    """Keeps blocks as they come, adds their counts to ``report``, and gives them mapped."""
    with _new_folder(folder, key) as place:
        writer = BlockWriter(place)
        try:
            for block, part in blocks:
                writer.append(block)
                report.add(part)
        finally:
            writer.close()
        (place / "report.json").write_text(json.dumps(report.as_dict()), encoding="utf-8")
    return map_block(folder / key)


@contextmanager
def _new_folder(folder: Path, key: str) -> Iterator[Path]:
    """A folder that gets its name when it is whole, and is gone when it never is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=folder))
    except OSError as error:
        raise UserError(
            f"data.token_cache {folder}: nothing can be kept there: {error.strerror}; name another folder, or set"
            " data.token_cache to off"
        ) from error
    try:
        yield place
        for file in place.iterdir():
            sync(file)  # else a power cut could leave the name with other content
        shutil.rmtree(folder / key, ignore_errors=True)
        try:
            place.rename(folder / key)
        except OSError:
            # Another run was quicker with the same tokens.
            if not (folder / key).is_dir():
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _file_mark(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, _samples(path, stat.st_size)]


def _samples(path: Path, size: int) -> str:
    """A hash of the whole of a small file and of parts, evenly spread, of a large one."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            hashed.update(file.read())
        else:
            for part in range(_SAMPLES):
                file.seek(part * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                hashed.update(file.read(_SAMPLE_BYTES))
    return hashed.hexdigest()


def _tokenizer_mark(tokenizer: Any) -> list[str]:
    whole = tokenizer.backend_tokenizer.to_str()
    return [
        hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(),
        repr(tokenizer.chat_template),
        repr(tokenizer.special_tokens_map),
    ]


@functools.cache
def _code_mark() -> list[str]:
    """The code of this package, templates included, and the libraries that it leans on."""
    here = Path(__file__).parent
    code = digest(sorted([*here.glob("*.py"), *here.glob("templates/*.jinja")]))
    libraries = [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
    return [code, *libraries]
