"""Whether the loss has jumped: some steps in a row far above the median of those before, measured robustly.

A run goes back then to the last checkpoint before those steps, and passes them over when it comes to them again:
their numbers and their rows are used up, and nothing is learned from them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

_WINDOW = 64
"""Steps that say what the loss is now."""
_FEWEST = 16
"""Below so many the guard keeps quiet: a loss falls fast at first."""
_NORMAL = 1.4826
"""A standard deviation over a median absolute one, of normal noise."""
_LEAST_SHARE = 0.005
"""Of the median, that counts as a deviation where the losses before hardly differed."""


class Spike(Exception):
    """The loss was far too high at ``steps``; ``checkpoint`` is the last whole one before them."""

    def __init__(self, steps: range, checkpoint: Path) -> None:
        super().__init__(f"the loss of steps {steps[0]} to {steps[-1]} was far above that of the steps before")
        self.steps, self.checkpoint = steps, checkpoint


class SpikeGuard:
    """Sees every step's loss, in order."""

    def __init__(self, deviations: float | None, in_a_row: int) -> None:
        """A spike: ``in_a_row`` steps more than ``deviations`` above the median. None: there is none."""
        self._limit, self._in_a_row = deviations, in_a_row
        self.begin([])

    def begin(self, losses: Iterable[tuple[int, float]]) -> None:
        """Forgets everything, and sees (step, loss) of the steps that a run has done before."""
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._high: list[tuple[int, float]] = []
        for step, loss in losses:
            self.see(step, loss)

    def see(self, step: int, loss: float) -> range | None:
        """The steps of a spike, when ``step`` makes it one. A step without a finite loss says nothing."""
        if self._limit is None or not math.isfinite(loss):
            return None
        if not self._is_high(loss):
            # Fewer than make a spike: as usual, from hindsight.
            self._usual.extend(high for _, high in self._high)
            self._high.clear()
            self._usual.append(loss)
            return None
        self._high.append((step, loss))
        if len(self._high) < self._in_a_row:
            return None
        first = self._high[0][0]
        self._usual.extend(high for _, high in self._high)  # if nobody goes back, this is the loss from now on
        self._high.clear()
        return range(first, step + 1)

    def _is_high(self, loss: float) -> bool:
        if self._limit is None or len(self._usual) < _FEWEST:
            return False
        median = statistics.median(self._usual)
        deviation = _NORMAL * statistics.median(abs(x - median) for x in self._usual)
        return loss > median + self._limit * max(deviation, _LEAST_SHARE * abs(median))
