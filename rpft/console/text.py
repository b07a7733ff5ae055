"""How records read: the same words in plain lines and in the live display."""

from __future__ import annotations

import time

from rpft.plan.bill import gib
from rpft.train.metrics import EvalRecord, StepRecord


class Pace:
    """Time left, from the median of the last steps: a slow first step does not spoil it."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._seconds: list[float] = []

    def eta(self, record: StepRecord) -> str:
        """Hours, minutes and seconds until the last step."""
        self._seconds = [*self._seconds[-19:], record.step_seconds]
        median = sorted(self._seconds)[len(self._seconds) // 2]
        left = round(median * (self.num_steps - record.step))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


def step_text(record: StepRecord, num_steps: int, eta: str) -> str:
    """One step on one line."""
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
