"""What the training loop tells whoever watches."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rpft.train.metrics import EvalRecord, StepRecord


class Reporter(Protocol):
    """Receives the events of a run, all from the main thread."""

    def say(self, text: str) -> None:
        """A line of prose."""
        ...

    def loading(self, done: int, total: int) -> None:
        """Tensors of the checkpoint read so far."""
        ...

    def begin(self, first_step: int, num_steps: int) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def evaluated(self, record: EvalRecord) -> None: ...

    def saved(self, path: Path) -> None: ...

    def close(self) -> None: ...
