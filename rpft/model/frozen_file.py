"""The frozen weights of a model in one file on the disk, as the host store's layers hold them, mapped.

The checkpoint's own files will not do: a layer goes up as one run of bytes in the order, precision and
quantisation of its layout, and there its tensors lie scattered, under other names, experts one by one. So each
layer's frozen part is written here once, from the start of a page on.

A file is written under another name and gets its own, which is a digest of all that its bytes depend on, when it
is whole on the disk. So what a run finds under that name is its own weights, and it need not read the checkpoint
again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from rpft import files
from rpft.errors import UserError
from rpft.model.layout import LayerLayout, align

_NAME = re.compile(r"frozen-[0-9a-f]{32}\.bin(\.partial)?")
_CODE = ("checkpoint.py", "float_files.py", "frozen_file.py", "layout.py", "quant*.py")
"""Whose change may change the bytes."""


def frozen_file_bytes(layouts: Iterable[LayerLayout]) -> int:
    """Bytes of the file of these layouts, exactly."""
    return sum(align(layout.frozen_bytes, mmap.PAGESIZE) for layout in layouts)


def frozen_files(folder: Path) -> list[Path]:
    """The files in ``folder``, whole or not; none where there is no such folder."""
    return [path for path in folder.glob("frozen-*") if _NAME.fullmatch(path.name)]


class FrozenFile:
    """One file. ``whole`` says whether what ``map`` gives is to be read, or to be written and then sealed."""

    def __init__(self, folder: Path, layouts: Sequence[LayerLayout], sources: Iterable[Path]) -> None:
        """``sources``: the checkpoint's files, of which name, size and time are taken for their content."""
        self._layouts = layouts
        self.num_bytes = frozen_file_bytes(layouts)
        self.path = folder / f"frozen-{_digest(layouts, sources)}.bin"
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._mapping: mmap.mmap | None = None

    @property
    def whole(self) -> bool:
        return self.path.is_file()

    def map(self) -> list[torch.Tensor]:
        """For each layer its frozen part, uint8 [frozen_bytes], mapped; UserError where the disk has no room.

        Where the file is not ``whole`` it is made, and files of other weights in its folder go first.
        """
        if self.whole:
            return self._map_whole()
        for path in frozen_files(self.path.parent):
            path.unlink()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._partial.open("xb+") as file:
                # A page of a mapping that the disk has no room for would end the process with a signal.
                files.reserve(file.fileno(), self.num_bytes)
                self._mapping = mmap.mmap(file.fileno(), self.num_bytes)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise UserError(
                f"{self._partial}: the frozen weights need a file of {self.num_bytes:,} bytes there"
                f" ({error.strerror}). Give another output_dir, or set engine.host_store to ram"
            ) from error
        return list(self._parts(self._mapping))

    def seal(self) -> list[torch.Tensor]:
        """As ``map``, when all is written: puts it on the disk for good; from now on it is only read."""
        assert self._mapping is not None
        self._mapping.flush()
        self._mapping = None
        files.sync(self._partial)
        files.rename(self._partial, self.path)
        return self._map_whole()

    def _map_whole(self) -> list[torch.Tensor]:
        with self.path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), self.num_bytes, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nobody writes to it
            return list(self._parts(mapping))

    def _parts(self, mapping: mmap.mmap) -> Iterator[torch.Tensor]:
        offset = 0
        for layout in self._layouts:
            if layout.frozen_bytes:
                yield torch.frombuffer(mapping, dtype=torch.uint8, count=layout.frozen_bytes, offset=offset)
            else:
                yield torch.empty(0, dtype=torch.uint8)
            offset += align(layout.frozen_bytes, mmap.PAGESIZE)


def _digest(layouts: Sequence[LayerLayout], sources: Iterable[Path]) -> str:
    """Of all that the bytes depend on: where they come from, where they go, and the code in between."""
    stats = [(str(path.resolve()), path.stat()) for path in sorted(sources)]
    told = {
        "sources": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "tensors": [
            [
                (spec.name, spec.checkpoint_name, spec.shape, str(spec.dtype), offset - layout.frozen_start)
                for spec, offset in layout.own.values()
                if not spec.trained
            ]
            for layout in layouts
        ],
        "packed": [{name: str(packed) for name, packed in layout.packed.items()} for layout in layouts],
        "page": mmap.PAGESIZE,
        "code": files.digest(p for name in _CODE for p in sorted(Path(__file__).parent.glob(name))),
    }
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()
