"""Tokenise a source in several processes; rows come back in the order of the source."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
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

_loader: RowLoader | None = None
"""Of a helping process."""


class TokenPool:
    """Tokenises sources, alone or with helping processes, which serve one source after the other.

    Leaving it as a context ends the helpers.
    """

    def __init__(
        self, tokenizer: Any, settings: DataSettings, processes: int, alone_rows: int = _ALONE_ROWS
    ) -> None:
        self._loader = RowLoader(tokenizer, settings)
        self._start_with = (tokenizer, settings)
        self._processes = processes
        self._alone_rows = alone_rows if processes > 1 else sys.maxsize
        self._helpers: ProcessPoolExecutor | None = None

    def __enter__(self) -> TokenPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._helpers is not None:
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
            # Not forked: the tokenizer's threads and torch's would be forked with their locks held.
            context = multiprocessing.get_context("spawn")
            self._helpers = ProcessPoolExecutor(self._processes, context, _start, self._start_with)
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


def _start(tokenizer: Any, settings: DataSettings) -> None:
    global _loader
    # An interrupt is for the process that a person started; it ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _loader = RowLoader(tokenizer, settings)


def _load(batch: list[Unread], first: int, source: Source) -> tuple[Block, SourceReport]:
    assert _loader is not None
    blocks, total = [], SourceReport(source.path, source.format)
    for start in range(0, len(batch), BATCH_ROWS):
        block, report = _loader.load(batch[start : start + BATCH_ROWS], first + start, source)
        blocks.append(block)
        total.add(report)
    return Block.joined(blocks), total
