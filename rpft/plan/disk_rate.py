"""How fast the disk of a folder is read, measured with a file that the system has been told to forget."""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
import time
from pathlib import Path

import torch

from rpft import files
from rpft.model.pages import read_ahead

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
