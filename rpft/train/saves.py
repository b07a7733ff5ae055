"""When a run saves, by steps and by minutes, and that the outcome of every save is noted."""

from __future__ import annotations

import time
from pathlib import Path

from rpft.recipe.sections.checkpoint import Checkpoint
from rpft.train.save_log import SaveLog
from rpft.train.saver import Saver


class Saves:
    """Those of one run, which ``saver`` writes; all from the main thread."""

    def __init__(self, settings: Checkpoint, saver: Saver, log: SaveLog) -> None:
        self._settings, self._saver, self._log = settings, saver, log

    def begin(self) -> None:
        """The minutes to the first save count from now on."""
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        settings = self._settings
        by_steps = settings.every_steps is not None and step % settings.every_steps == 0
        minutes = (time.monotonic() - self._last) / 60
        return by_steps or (settings.every_minutes is not None and minutes >= settings.every_minutes)

    def arm(self, step: int) -> None:
        """See ``Saver.arm``."""
        self._saver.arm(step)
        self._last = time.monotonic()

    def note(self, may_fail: bool = True) -> None:
        """Notes what became of the saves that ended; see ``SaveLog.note``."""
        self._log.note(self._saver.take_reports(), may_fail)

    def finish(self, may_fail: bool = True) -> None:
        """Waits for a save in progress and notes what became of it."""
        self._saver.wait()
        self.note(may_fail)

    def go_back(self, checkpoint: Path) -> None:
        """Notes them so far; from now on ``checkpoint`` is the last one."""
        self.note()
        self._log.last_checkpoint = checkpoint
