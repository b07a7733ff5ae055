"""Tokenise a source in several processes; rows come back in the order of the source."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from multiprocessing.synchronize import Event
from typing import Any

from rpft.data.loader import DataSettings, RowLoader
from rpft.data.report import SourceReport
from rpft.data.rows import Block
from rpft.data.sources import Source, Unread
from rpft.errors import UserError

BATCH_ROWS = 256
"""Rows handed to the tokenizer at once: enough to keep its threads busy, few enough to stay small in RAM."""

_TASK_ROWS = 1024
"""Rows sent to a process at once, which costs about a millisecond."""

_TASKS_A_PROCESS = 3
"""Sent ahead, so that no process waits and memory stays bounded."""

_ALONE_ROWS = 16_384
"""Rows that one process tokenises before it asks for help: others need seconds to start."""

_POLL_SECONDS = 0.2
"""How often a helping process looks whether it is still wanted."""

_GRACE_SECONDS = 1.0
"""For the rows that one which is not wanted any more is at."""

_loader: RowLoader | None = None
"""Of a helping process."""

_unwanted: Event | None = None
"""Of a helping process: whether nobody waits for its rows any more."""


class TokenPool:
    """Tokenises sources, alone or with helping processes, which serve one source after the other.

    Leaving it as a context ends the helpers; with an error, whatever they are at.
    """

    def __init__(
        self, tokenizer: Any, settings: DataSettings, processes: int, alone_rows: int = _ALONE_ROWS
    ) -> None:
        self._loader = RowLoader(tokenizer, settings)
        self._start_with = (tokenizer, settings)
        # Not forked: the tokenizer's threads and torch's would be forked with their locks held.
        self._context = multiprocessing.get_context("spawn")
        self._unwanted = self._context.Event()
        self._processes = processes
        self._alone_rows = alone_rows if processes > 1 else sys.maxsize
        self._helpers: ProcessPoolExecutor | None = None

    def __enter__(self) -> TokenPool:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._helpers is None:
            return
        if error is not None:
            self._unwanted.set()
        self._helpers.shutdown(wait=True, cancel_futures=True)

    def blocks(self, stream: Iterator[Unread], source: Source) -> Iterator[tuple[Block, SourceReport]]:
        """Blocks of tokens and their counts, in the order of ``stream``.

        But for where blocks end, what is yielded does not depend on the number of processes.
        """
        first = 0
        # The source's first row says the format.
        while first < self._alone_rows and (self._helpers is None or source.format == "auto"):
            batch = list(islice(stream, BATCH_ROWS))
            if not batch:
                return
            block, report = self._loader.load(batch, first, source)
            source = source if source.format != "auto" else replace(source, format=report.format)
            first += len(batch)
            yield block, report
        yield from self._helped(stream, first, source)

    def _helped(
        self, stream: Iterator[Unread], first: int, source: Source
    ) -> Iterator[tuple[Block, SourceReport]]:
        if self._helpers is None:
            # Pickled here, so that a process that is no longer wanted need not import what they are made of.
            start_with = self._unwanted, pickle.dumps(self._start_with)
            self._helpers = ProcessPoolExecutor(self._processes, self._context, _start, start_with)
        sent: deque[Future[tuple[Block, SourceReport]]] = deque()
        try:
            more = True
            while more or sent:
                while more and len(sent) < _TASKS_A_PROCESS * self._processes:
                    batch = list(islice(stream, _TASK_ROWS))
                    more = len(batch) == _TASK_ROWS
                    if batch:
                        sent.append(self._helpers.submit(_load, batch, first, source))
                        first += len(batch)
                if sent:
                    yield sent.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that tokenises was ended from outside, most often for want of memory; set"
                " data.processes to a smaller number"
            ) from error


def _start(unwanted: Event, start_with: bytes) -> None:
    global _loader, _unwanted
    # An interrupt is for the process that a person started; it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _unwanted = unwanted
    threading.Thread(target=_end_with_the_run, args=(unwanted,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _loader = RowLoader(*pickle.loads(start_with))


def _end_with_the_run(unwanted: Event) -> None:
    """Ends this process when the one that started it has ended, however that did, or does not want it any more."""
    run = multiprocessing.parent_process()
    assert run is not None
    while run.is_alive() and not unwanted.is_set():
        run.join(_POLL_SECONDS)
    run.join(_GRACE_SECONDS)
    os._exit(1)


def _load(batch: list[Unread], first: int, source: Source) -> tuple[Block, SourceReport]:
    assert _loader is not None
    assert _unwanted is not None
    blocks, total = [], SourceReport(source.path, source.format)
    for start in range(0, len(batch), BATCH_ROWS):
        if _unwanted.is_set():
            raise CancelledError
        block, report = _loader.load(batch[start : start + BATCH_ROWS], first + start, source)
        blocks.append(block)
        total.add(report)
    return Block.joined(blocks), total
