"""Page-locked host memory, which a CUDA device copies from and to at full speed: exact and given back."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch

from rpft.model.pages import map_pages

logger = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""


class _PageLocking:
    refused = False
    lock = threading.Lock()


def page_locked(num_bytes: int) -> torch.Tensor:
    """Exactly ``num_bytes`` of zeroed page-locked memory, uint8; pageable, and said once, where refused.

    A mapping that is registered afterwards: the caching allocator for pinned memory rounds up to powers of
    two and would waste up to half of the RAM. The pages are touched before, by several threads, since
    registering brings them in one by one. Any thread may call this; several buffers at once are quicker.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapping = map_pages(num_bytes)
    holder = (ctypes.c_char * num_bytes).from_buffer(mapping)
    tensor = torch.frombuffer(holder, dtype=torch.uint8)
    if _PageLocking.refused:
        return tensor
    # A fork would copy every locked page at once, and the child has no use for them.
    mapping.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, _PORTABLE)
    if int(code) == 0:
        # The finaliser holds the mapping, so that the pages are given back to the system only after this.
        weakref.finalize(holder, _unregister, runtime, tensor.data_ptr(), mapping)
    else:
        _forget_error()
        _say_refused(code)
    return tensor


def _forget_error() -> None:
    """Takes this thread's last error from the runtime, which else keeps it for the next kernel to fail with."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _say_refused(code: object) -> None:
    with _PageLocking.lock:
        if _PageLocking.refused:
            return
        _PageLocking.refused = True
    logger.warning(
        "the system refused to page-lock host memory (%s): copies run from pageable memory, several"
        " times slower; raise the limit (ulimit -l unlimited) to mend it",
        code,
    )


def _unregister(runtime: Any, address: int, mapping: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)
    del mapping
