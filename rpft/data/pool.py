"""Tokenise a source in several processes; rows come back in the order of the source."""

from __future__ import annotations

import multiprocessing
import os
import signal
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


def load_blocks(
    stream: Iterator[Unread],
    source: Source,
    tokenizer: Any,
    settings: DataSettings,
    processes: int,
    alone_rows: int = _ALONE_ROWS,
) -> Iterator[tuple[Block, SourceReport]]:
    """Blocks of tokens and their counts, in the order of ``stream``.

    But for where blocks end, what is yielded does not depend on ``processes``.
    """
    loader = RowLoader(tokenizer, settings)
    first = 0
    while first < alone_rows or processes < 2:
        batch = list(islice(stream, BATCH_ROWS))
        if not batch:
            return
        block, report = loader.load(batch, first, source)
        # The source's first row has said the format.
        source = _of_format(source, report)
        first += len(batch)
        yield block, report
    yield from _in_processes(stream, first, source, tokenizer, settings, processes)


def _of_format(source: Source, report: SourceReport) -> Source:
    return source if source.format != "auto" else replace(source, format=report.format)


def _in_processes(
    stream: Iterator[Unread], first: int, source: Source, tokenizer: Any, settings: DataSettings, processes: int
) -> Iterator[tuple[Block, SourceReport]]:
    # Not forked: the tokenizer's threads and torch's would be forked with their locks held.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start, (tokenizer, settings))
    sent: deque[Future[tuple[Block, SourceReport]]] = deque()
    try:
        more = True
        while more or sent:
            while more and len(sent) < _TASKS_A_PROCESS * processes:
                batch = list(islice(stream, _TASK_ROWS))
                more = len(batch) == _TASK_ROWS
                if batch:
                    sent.append(pool.submit(_load, batch, first, source))
                    first += len(batch)
            if sent:
                yield sent.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenises was ended from outside, most often for want of memory; set data.processes"
            " to a smaller number"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
