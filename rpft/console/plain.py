"""Plain lines, for logs, pipes and CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rpft.console.text import Pace, clock, eval_text, step_text
from rpft.train.metrics import EvalRecord, StepRecord

if TYPE_CHECKING:
    from rpft.train.watched import Watched


class PlainReporter:
    """A line an event, flushed at once. ``every_steps``: steps between lines; the last step always has one."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._loaded_tenths = 0

    def say(self, text: str) -> None:
        print(f"{clock()} {text}", flush=True)

    def warn(self, text: str) -> None:
        print(f"{clock()} warning: {text}", file=sys.stderr, flush=True)

    def loading(self, done: int, total: int) -> None:
        tenths = done * 10 // total
        if tenths > self._loaded_tenths:
            self._loaded_tenths = tenths
            if tenths in (5, 10):
                self.say(f"loading weights: {done} of {total} tensors")

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        self._pace = Pace(num_steps, None if watched is None else watched.predicted_seconds)
        self.say(f"training: steps {first_step} to {num_steps}")

    def stepped(self, record: StepRecord) -> None:
        eta = self._pace.eta(record)
        if record.step % self._every_steps == 0 or record.step == self._pace.num_steps:
            self.say(step_text(record, self._pace.num_steps, eta))

    def evaluated(self, record: EvalRecord) -> None:
        self.say(eval_text(record))

    def saved(self, path: Path) -> None:
        self.say(f"saved {path}")

    def close(self) -> None:
        """Nothing is held open."""
