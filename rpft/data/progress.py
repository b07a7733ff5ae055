"""Show how far the tokenisation of large data is: a bar on a terminal, seldom a line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rpft.data.sources import Source

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOWN_AFTER_SECONDS = 1.0
_LINE_EVERY_SECONDS = 30.0


class LoadingProgress:
    """What ``Loading.progress`` calls, on the error stream; a load that is quick shows nothing."""

    def __init__(self) -> None:
        self._begun = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, source: Source, rows: int, done: bool) -> None:
        now = time.monotonic()
        if now - self._begun < _SHOWN_AFTER_SECONDS:
            return
        if not sys.stderr.isatty():
            if now - self._said > _LINE_EVERY_SECONDS:
                self._said = now
                print(f"tokenising {source.path}: {rows:,} rows", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = _make_bar()
            self._bar.start()
        if source.path not in self._tasks:
            self._tasks[source.path] = self._bar.add_task(source.path, total=None)
        self._bar.update(self._tasks[source.path], completed=rows, total=rows if done else None)


def _make_bar() -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("tokenising {task.description}: {task.completed:,.0f} rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
