"""Ordinary host memory in large amounts: zeroed, of exact size, in huge pages, touched by several threads."""

from __future__ import annotations

import ctypes
import functools
import mmap
from contextlib import suppress
from typing import Any

import torch


def zeroed_pages(num_bytes: int) -> torch.Tensor:
    """Exactly ``num_bytes`` of zeroed host memory, uint8, given back to the system with the last view of it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(map_pages(num_bytes), dtype=torch.uint8)


def map_pages(num_bytes: int) -> mmap.mmap:
    """A private anonymous mapping of ``num_bytes`` > 0, every page of it present; OSError where RAM is short."""
    mapping = absent_pages(num_bytes)
    touch(torch.frombuffer(mapping, dtype=torch.uint8))
    return mapping


def absent_pages(num_bytes: int) -> mmap.mmap:
    """As ``map_pages``, but no page is present, nor takes RAM, until it is first touched.

    Huge pages make the first touch of a gigabyte several times faster, page-locking it too.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: small ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def touch(fresh: torch.Tensor) -> None:
    """Brings the pages of ``fresh``, uint8 from the start of a page on, into RAM, in torch's threads.

    Left to whoever writes first, it would slow down loading and the first step.
    """
    fresh[:: mmap.PAGESIZE].zero_()


def read_ahead(mapped: torch.Tensor) -> None:
    """Asks the system to bring ``mapped``, which lies in a file's mapping, into RAM; does not wait for it.

    A page fault alone reads little at a time, one after the other, which leaves a fast disk idle.
    """
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - start
    if mapped.nbytes and hasattr(mmap, "MADV_WILLNEED"):  # advice: a system that refuses it reads all the same
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_WILLNEED)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
