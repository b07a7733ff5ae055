"""What the training loop tells whoever watches, and that nothing is lost when nobody can any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rpft.train.metrics import EvalRecord, StepRecord

if TYPE_CHECKING:
    from rpft.train.watched import Watched


class Reporter(Protocol):
    """Receives the events of a run, all but warnings from the main thread."""

    def say(self, text: str) -> None:
        """A line of prose."""
        ...

    def warn(self, text: str) -> None:
        """What a person should know of; from any thread."""
        ...

    def loading(self, done: int, total: int) -> None:
        """Tensors of the checkpoint read so far."""
        ...

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        """Training begins; ``watched`` tells at any time how it stands."""
        ...

    def stepped(self, record: StepRecord) -> None: ...

    def evaluated(self, record: EvalRecord) -> None: ...

    def saved(self, path: Path) -> None: ...

    def close(self) -> None: ...


class LastingReporter:
    """Passes everything on until the output is gone, as with a closed terminal or pipe; is silent from then on."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._silent = False

    def say(self, text: str) -> None:
        self._try(lambda: self._reporter.say(text))

    def warn(self, text: str) -> None:
        self._try(lambda: self._reporter.warn(text))

    def loading(self, done: int, total: int) -> None:
        self._try(lambda: self._reporter.loading(done, total))

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        self._try(lambda: self._reporter.begin(first_step, num_steps, watched))

    def stepped(self, record: StepRecord) -> None:
        self._try(lambda: self._reporter.stepped(record))

    def evaluated(self, record: EvalRecord) -> None:
        self._try(lambda: self._reporter.evaluated(record))

    def saved(self, path: Path) -> None:
        self._try(lambda: self._reporter.saved(path))

    def close(self) -> None:
        self._try(self._reporter.close)

    def _try(self, tell: Callable[[], None]) -> None:
        if self._silent:
            return
        try:
            tell()
        except OSError:
            self._silent = True
            # Else what is left in the buffers would be a fault at the end of the process.
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
