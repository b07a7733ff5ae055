"""Figures as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in the unit that reads best, to three digits or so."""
    size = abs(seconds)
    unit, scale = ("s", 1.0) if size >= 1 or not size else ("ms", 1e3) if size >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
