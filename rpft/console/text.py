"""How records read: the same words in plain lines and in the live display."""

from __future__ import annotations

import time

from rpft.plan.bill import gib
from rpft.train.metrics import EvalRecord, StepRecord

_STEPS_OF_A_PACE = 20
_STEPS_UNTIL_SURE = 3
"""With fewer the quickest counts: of the first steps several may compile something."""


class Pace:
    """Time left and tokens a second. The first step, which compiles, says nothing of the others."""

    def __init__(self, num_steps: int, expected_seconds: float | None = None) -> None:
        """``expected_seconds``: of a step, as predicted; what counts until there are steps enough."""
        self.num_steps, self._expected = num_steps, expected_seconds
        self._seconds: list[float] = []
        self._seen = 0
        self._tokens, self._total_seconds = 0, 0.0

    def see(self, record: StepRecord) -> None:
        """Counts a step that is over."""
        self._seen += 1
        if self._seen > 1:
            self._seconds = [*self._seconds[1 - _STEPS_OF_A_PACE :], record.step_seconds]
            self._tokens += record.tokens
            self._total_seconds += record.step_seconds

    @property
    def step_seconds(self) -> float | None:
        """The usual length of a step; None where nothing says it yet."""
        if len(self._seconds) < _STEPS_UNTIL_SURE:
            return self._expected if self._expected is not None else min(self._seconds, default=None)
        return sorted(self._seconds)[len(self._seconds) // 2]

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over all steps but the first one seen."""
        return self._tokens / self._total_seconds if self._total_seconds else None

    def seconds_left(self, step: int) -> float | None:
        """From the end of ``step`` to the end of the last; None where nothing says it yet."""
        if step >= self.num_steps:
            return 0.0
        return None if self.step_seconds is None else self.step_seconds * (self.num_steps - step)

    def eta(self, record: StepRecord) -> str:
        """Counts ``record``; hours, minutes and seconds until the last step, "-" where nothing says it yet."""
        self.see(record)
        return duration(self.seconds_left(record.step))


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, or "-"."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def step_text(record: StepRecord, num_steps: int, eta: str) -> str:
    """One step on one line: names and values, " | " between them."""
    devices = " ".join(f"{d['name']} {gib(d['peak_bytes'])}" for d in record.devices)
    skipped = f" | skipped {record.skipped_steps}" if record.skipped_steps else ""
    return (
        f"step {record.step}/{num_steps} | loss {record.loss:.4f} | lr {record.learning_rate:.2e}"
        f" | grad norm {record.grad_norm:.3f} | {record.tokens_per_second:.0f} tok/s"
        f" | {devices} | RAM {gib(record.host_rss_bytes)} | ETA {eta}{skipped}"
    )


def eval_text(record: EvalRecord) -> str:
    """One evaluation on one line."""
    return f"evaluation after step {record.step}: loss {record.eval_loss:.4f} over {record.eval_tokens} tokens"


def clock() -> str:
    return time.strftime("%H:%M:%S")
