"""Where figures stand on an axis: a range that no spike stretches, round ticks, fewer points, a middle line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

MOST_POINTS = 1500
"""Points of a line: more than a screen has columns for it."""

_OUTLIERS = 0.02
"""Share of figures at each end that may be outliers."""
_FEW = 8
"""With fewer figures none is one."""
_FAR = 4.0
"""How many times the spread of the others an outlier is away from them."""
NOISY_FROM = 60
"""Points from which on a noisy line is drawn with its running median."""
_SMOOTHED_POINTS, _WINDOWS = 300, 40
_MOST_TICKS = 6


@dataclass(frozen=True)
class Scale:
    """From figures to 0 (the lower end) to 1; those beyond an end stand at it."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        if self.log:
            return _within(math.log(value / self.low) / math.log(self.high / self.low)) if value > 0 else 0.0
        return _within((value - self.low) / (self.high - self.low))

    def holds(self, value: float) -> bool:
        """Whether it stands where it belongs."""
        slack = 1e-9 * (abs(self.low) + abs(self.high))
        return self.low - slack <= value <= self.high + slack

    def ticks(self, most: int = _MOST_TICKS) -> list[float]:
        """Round figures inside, at most about ``most``."""
        if self.log:
            for factors in ((1,), (1, 2, 5)):
                found = [value for value in _powers(self.low, self.high, factors) if self.holds(value)]
                if len(found) > most:
                    return found[:: math.ceil(len(found) / most)]
                if len(found) >= 3:
                    return found
        step = round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def fitting(values: Sequence[float], log: bool = False, zero: bool = False) -> Scale:
    """A scale for ``values`` with some air, without what is far from all others; ``zero``: from 0 up."""
    if log:
        values = [value for value in values if value > 0]
    if not values:
        return Scale(1.0, 10.0, log) if log else Scale(0.0, 1.0)
    low, high = _without_outliers([math.log(value) for value in values] if log else values)
    if zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        around = 0.5 if log else 0.1 * abs(high) or 1.0
        low, high = low - around, high + around
    air = 0.06 * (high - low)
    low, high = low if zero and low == 0 else low - air, high + air
    if not log and low < 0 <= min(values):
        low = 0.0
    return Scale(math.exp(low), math.exp(high), True) if log else Scale(low, high)


def _without_outliers(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if len(ordered) < _FEW:
        return low, high
    beyond = max(2, int(_OUTLIERS * len(ordered)))
    usual_low, usual_high = ordered[beyond], ordered[-1 - beyond]
    spread = (usual_high - usual_low) or 0.05 * abs(usual_high)
    least, most = usual_low - _FAR * spread, usual_high + _FAR * spread
    usual = [value for value in ordered if least <= value <= most]
    return usual[0], usual[-1]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most ``most`` of ``points``: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    kept = [points[0]]
    stretches = (most - 2) // 2
    for i in range(stretches):
        stretch = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    kept.append(points[-1])
    return sorted(set(kept))


def middle_line(points: Sequence[Point]) -> list[Point] | None:
    """The running median of noisy figures; None where there are too few of them to need one."""
    count = len(points)
    if count < NOISY_FROM:
        return None
    half = max(3, count // _WINDOWS) // 2 + 1
    every = max(1, count // _SMOOTHED_POINTS)
    line = []
    for i in [*range(0, count - 1, every), count - 1]:
        # Narrower at the start, where figures fall fast; at the end, where they hardly do, what is behind counts.
        reach = min(half, max(2, i))
        window = points[max(0, i - reach) : i + reach + 1]
        line.append((points[i][0], statistics.median(y for _, y in window)))
    return line


def round_step(rough: float) -> float:
    """The round figure (1, 2 or 5 times a power of ten) that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _powers(low: float, high: float, factors: Sequence[int]) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [factor * 10.0**power for power in range(first, last + 1) for factor in factors]


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))
