"""Figures as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in the unit that reads best, to three digits or so."""
    size = abs(seconds)
    unit, scale = ("s", 1.0) if size >= 1 or not size else ("ms", 1e3) if size >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def short(value: float, digits: int = 4) -> str:
    """A figure to ``digits`` digits, tiny and huge ones as powers of ten, in as few characters as that takes."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if value and not 2e-3 <= abs(value) < 1e7:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    whole = len(f"{abs(value):.0f}")
    return f"{value:.{max(digits, whole)}g}"


def count(number: int) -> str:
    """How many, where millions need not be told to the last."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= 10 * size or (number >= size and unit == "M"):
            return f"{number / size:,.4g} {unit}"
    return f"{number:,}"
