"""How many threads work on the optimizer's tensors, without a change for any other thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rpft.host import available_cores

T = TypeVar("T")

_WORTH_MORE_THREADS = 0.03
"""A higher number of threads is taken for at least this share of the time."""

_ROUNDS = 4
"""How often each number of threads has its turn, so that what else goes on meets all of them alike."""

_RUNS_OF_A_TURN = 2
"""The first also starts the threads."""


@contextlib.contextmanager
def openmp_threads(count: int | None) -> Iterator[None]:
    """This thread's OpenMP regions have ``count`` threads, other threads' what they had; None changes nothing.

    ``torch.set_num_threads`` would also change what threads get that use torch for the first time later.
    """
    openmp = _openmp()
    if openmp is None or count is None:
        yield
        return
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(count)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@functools.cache
def _openmp() -> ctypes.PyDLL | None:
    """GCC's OpenMP, which compiled kernels and torch's own on Linux use; where there is none, nothing is set.

    What it is asked takes no time, so that the GIL is kept: who lets go of it may wait long to have it again.
    """
    try:
        return ctypes.PyDLL("libgomp.so.1")
    except OSError:
        return None


def thread_counts(spare_cores: int) -> list[int]:
    """Numbers of threads worth a trial: all cores of this process but ``spare_cores``, and some shares of that."""
    most = max(1, available_cores() - spare_cores)
    return sorted({max(1, round(most * share)) for share in (0.25, 0.375, 0.5, 0.75, 1.0)})


def measure(counts: list[int], setup: Callable[[], Callable[[], None]]) -> dict[int, float]:
    """The least seconds that the work which ``setup`` returns takes on each number of threads.

    The least, since only what the numbers do to one another counts here, and other work makes any of them longer;
    what a run may expect is measured otherwise (train/beside.py).
    """

    def run() -> dict[int, float]:
        work = setup()
        seconds = dict.fromkeys(counts, math.inf)
        for count in counts * _ROUNDS:
            for _ in range(_RUNS_OF_A_TURN):
                started = time.perf_counter()
                with openmp_threads(count):
                    work()
                seconds[count] = min(seconds[count], time.perf_counter() - started)
        return seconds

    return in_own_thread(run)


def in_own_thread(work: Callable[[], T]) -> T:
    """Does ``work`` in a thread of its own, because OpenMP keeps a thread's helpers for as long as that lives."""
    with ThreadPoolExecutor(1, "optimizer") as executor:
        return executor.submit(work).result()


def choose(seconds: Mapping[int, float]) -> int:
    """From seconds by number of threads, the lowest number that is within 3% of the fastest."""
    limit = min(seconds.values()) * (1 + _WORTH_MORE_THREADS)
    return min(count for count, taken in seconds.items() if taken <= limit)
