"""How fast the disk of a folder is read, written, and both at the same time; measured past the system's cache."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rpft import files
from rpft.model.pages import read_ahead, zeroed_pages
from rpft.model.scratch_file import ScratchFile

_BYTES = 1 << 28
"""256 MiB: a tenth of a second of a fast disk, two seconds of a slow one."""


@functools.cache
def disk_rate(folder: Path, num_bytes: int = _BYTES) -> float | None:
    """Bytes a second that a file in ``folder``, which need not exist yet, is read with, once a process.

    It is read as frozen weights are: mapped, asked for, copied. None where the folder cannot be written, or the
    system cannot be told to forget what it has just written, so that its memory would be measured.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    content = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        with tempfile.TemporaryFile(dir=files.existing_folder(folder)) as file:
            content.numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            source = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
            started = time.perf_counter()
            read_ahead(source)
            target.copy_(source)
            return num_bytes / (time.perf_counter() - started)
    except OSError:
        return None


_RUN_BYTES = 1 << 25


@functools.cache
def turnover_rate(folder: Path, num_bytes: int = _BYTES) -> float | None:
    """Bytes a second that are read from a file in ``folder`` and written back, both at once, once a process.

    By two threads, in large runs, past the cache: as moments are. None where the folder has no room for that.
    """
    runs = range(0, num_bytes, min(_RUN_BYTES, num_bytes))
    content = zeroed_pages(runs.step).copy_(torch.randint(256, (runs.step,), dtype=torch.uint8))
    target = zeroed_pages(runs.step)

    def all_runs(move: Callable[[int, torch.Tensor], None], buffer: torch.Tensor) -> None:
        for start in runs:
            move(start, buffer)

    try:
        file = ScratchFile(folder, num_bytes)
    except OSError:
        return None
    try:
        all_runs(file.write_blocks, content)  # what was never written is not read from the disk either
        started = time.perf_counter()
        with ThreadPoolExecutor(2, "disk") as pool:
            both = [
                pool.submit(all_runs, file.read_blocks, target),
                pool.submit(all_runs, file.write_blocks, content),
            ]
        for each in both:
            each.result()
        return num_bytes / (time.perf_counter() - started)
    except OSError:
        return None
    finally:
        file.close()


@functools.cache
def write_rate(folder: Path, num_bytes: int = _BYTES) -> float | None:
    """Bytes a second that a file in ``folder``, which need not exist yet, is written with, once a process.

    Written as a checkpoint is, and synced; its checksum is taken meanwhile, and may be the slower of both. At most
    256 MiB of ``num_bytes`` are written. None where the folder cannot be.
    """
    content = torch.randint(256, (min(num_bytes, _BYTES),), dtype=torch.uint8).numpy()
    try:
        with tempfile.TemporaryFile(dir=files.existing_folder(folder)) as file:
            started = time.perf_counter()
            with ThreadPoolExecutor(1, "checksum") as hasher:
                hashed = hasher.submit(hashlib.sha256, content.data)
                content.tofile(file)
                file.flush()
                os.fsync(file.fileno())
                hashed.result()
            return content.nbytes / (time.perf_counter() - started)
    except OSError:
        return None
