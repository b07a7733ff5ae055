"""A file that lives no longer than the process: state that would else take RAM, read and written past the cache.

It never has a name: where the file system can, it is made without one, else the name goes before anything is
written. So no two runs can share one, none is found by a later run, and whatever ends the process frees its bytes.

What is read and written here is larger than RAM by intent; left to the system's cache, it would push out what RAM
is there for. So it goes past it (O_DIRECT) where the file system allows that; elsewhere each run of bytes is
written to the disk at once and then forgotten. All of the file is reserved when it is made.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch

from rpft import files
from rpft.model.layout import align
from rpft.model.pages import zeroed_pages

BLOCK_BYTES = 4096
"""Places and lengths are multiples of this, and buffers begin at one: what O_DIRECT may ask for."""

_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_IN_RAM = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")


class ScratchFile:
    """Zeros, at first. Any thread may read and write; where both meet, the caller orders them."""

    def __init__(self, folder: Path, num_bytes: int, direct: bool = True) -> None:
        """``num_bytes`` > 0: rounded up to blocks. ``direct``: whether to go past the cache where that can be.

        OSError where ``folder`` cannot be written or has no room.
        """
        self.num_bytes = align(num_bytes, BLOCK_BYTES)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            files.reserve(file.fileno(), self.num_bytes)
            self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.direct = direct and self._goes_past_the_cache()

    def close(self) -> None:
        """Gives the file's bytes back to the disk. Nobody may be reading or writing."""
        self._descriptor = -1
        self._close()

    def read_blocks(self, offset: int, target: torch.Tensor) -> None:
        """Fills ``target``, whole blocks of uint8, from ``offset`` on; OSError where the disk cannot."""
        files.read_at(self._descriptor, target.numpy().data, offset)
        if not self.direct:
            self._forget(offset, target.numel())

    def write_blocks(self, offset: int, source: torch.Tensor) -> None:
        """Writes ``source``, whole blocks of uint8, to ``offset``; OSError where the disk cannot."""
        files.write_at(self._descriptor, source.numpy().data, offset)
        if not self.direct:
            os.fsync(self._descriptor)  # what is yet to be written cannot be forgotten
            self._forget(offset, source.numel())

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop``, uint8, in new memory."""
        first = start // BLOCK_BYTES * BLOCK_BYTES
        blocks = _aligned_buffer(align(stop, BLOCK_BYTES) - first)
        self.read_blocks(first, blocks)
        return blocks[start - first : stop - first]

    def write(self, start: int, data: torch.Tensor) -> None:
        """Writes ``data``, uint8 [n], to ``start``; what else is in the blocks that it touches stays."""
        stop = start + data.numel()
        first, last = start // BLOCK_BYTES * BLOCK_BYTES, align(stop, BLOCK_BYTES)
        blocks = _aligned_buffer(last - first)
        if first < start:
            self.read_blocks(first, blocks[:BLOCK_BYTES])
        if stop < last:
            self.read_blocks(last - BLOCK_BYTES, blocks[-BLOCK_BYTES:])
        blocks[start - first : stop - first].copy_(data)
        self.write_blocks(first, blocks)

    def _goes_past_the_cache(self) -> bool:
        """Turns the cache off for this file; whether the file system took it, which a read and a write show."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        block = _aligned_buffer(BLOCK_BYTES)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._descriptor, [block.numpy().data], 0)
            os.pwritev(self._descriptor, [block.numpy().data], 0)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def _forget(self, offset: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _aligned_buffer(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8, that begin at a page, which no block is larger than."""
    assert mmap.PAGESIZE % BLOCK_BYTES == 0
    return zeroed_pages(num_bytes)


def lies_in_ram(folder: Path) -> bool:
    """Whether the file system of ``folder`` keeps its files in RAM; False where that cannot be told."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS [TAG]... - TYPE SOURCE OPTIONS
    types = {fields[2]: fields[fields.index("-") + 1] for fields in mounts}
    return types.get(name) in _IN_RAM
