"""What became of the saves of a run: said to whoever watches, and no more of them may fail than a run can bear."""

from __future__ import annotations

from pathlib import Path

from rpft.plan.bill import gib
from rpft.train.reporter import Reporter
from rpft.train.saver import SaveReport

MOST_FAILED_IN_A_ROW = 3


class SaveLog:
    """Keeps count of saves; all from the main thread."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._failed_in_a_row = 0
        self.last_checkpoint: Path | None = None
        """The newest whole checkpoint that the run knows of."""

    def note(self, reports: list[SaveReport], may_fail: bool = True) -> None:
        """Says each of ``reports``. Raises the error of one when too many failed, or when none ``may_fail``."""
        for report in reports:
            for path in report.removed:
                self._reporter.say(f"removed {path} to make room")
            if report.path is not None:
                self._failed_in_a_row, self.last_checkpoint = 0, report.path
                self._reporter.saved(report.path)
                self._reporter.say(
                    f"{gib(report.num_bytes)} were saved in {report.seconds:.1f} s, {gib(report.copied_bytes)} of"
                    f" them from copies, and training was held up for {report.stall_seconds:.2f} s of it"
                )
                continue
            assert report.error is not None
            self._failed_in_a_row += 1
            if not may_fail or self._failed_in_a_row >= MOST_FAILED_IN_A_ROW:
                raise report.error
            self._reporter.say(
                f"step {report.step} could not be saved: {report.error}. The run goes on and tries again when the"
                f" next save is due; the last checkpoint is {self.last_checkpoint or 'none'}"
            )
