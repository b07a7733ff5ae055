"""Everybody who is told of a run: the console, run.log, and whoever follows its figures elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path

from rpft.console.text import Pace, eval_text, step_text
from rpft.train.metrics import EvalRecord, StepRecord
from rpft.train.reporter import Reporter
from rpft.train.sinks import Sinks
from rpft.train.watched import Watched

logger = logging.getLogger("rpft.run")


class Audience:
    """A reporter that tells the console, the log and the sinks, in this order."""

    def __init__(self, console: Reporter, sinks: Sinks, quiet: bool = False) -> None:
        """``quiet``: what describes a run before it begins is for the log only."""
        self._console, self._sinks, self._quiet = console, sinks, quiet

    def describe(self, text: str) -> None:
        """A line about what is going to be done."""
        if self._quiet:
            logger.info("%s", text)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        self._console.say(text)
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def loading(self, done: int, total: int) -> None:
        self._console.loading(done, total)

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        self._pace = Pace(num_steps, None if watched is None else watched.predicted_seconds)
        self._console.begin(first_step, num_steps, watched)
        logger.info("training: steps %d to %d", first_step, num_steps)
        self._sinks.begin(first_step)

    def stepped(self, record: StepRecord) -> None:
        self._console.stepped(record)
        logger.info("%s", step_text(record, self._pace.num_steps, self._pace.eta(record)))
        self._sinks.stepped(record)

    def evaluated(self, record: EvalRecord) -> None:
        self._console.evaluated(record)
        logger.info("%s", eval_text(record))
        self._sinks.evaluated(record)

    def saved(self, path: Path) -> None:
        self._console.saved(path)
        logger.info("saved %s", path)

    def close(self) -> None:
        self._sinks.close()
        self._console.close()
