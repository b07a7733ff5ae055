"""How the microbatches of a step can be divided into rounds."""

from __future__ import annotations


def choose_num_microbatches(accumulation: int, most: int = 16) -> int:
    """M for a step of ``accumulation`` microbatches where no time is known: its largest divisor up to ``most``.

    More microbatches a round move weights less often and keep more hidden states in RAM.
    """
    return next(m for m in divisors(accumulation) if m <= most)


def divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]
