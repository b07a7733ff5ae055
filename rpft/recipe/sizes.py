"""Sizes in bytes as people write them: "24GiB"."""

from __future__ import annotations

import re
from fractions import Fraction

from rpft.errors import UserError

_FACTORS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS[f"{_letter}b"] = 1000**_power
    _FACTORS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_bytes(size: int | float | str) -> int:
    """Turn "24GiB", "24 GB", "1.5TiB", "1000" or a whole number into a positive number of bytes.

    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB are powers of 1000; case is ignored and
    a fraction of a byte is dropped. Raises UserError for anything else, also for zero and below.
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise UserError(f"expected a size such as 24GiB or a number of bytes, found {size!r}")
    if isinstance(size, str):
        num_bytes = _parse_text(size)
    elif size == size // 1:
        num_bytes = int(size)
    else:
        raise UserError(f"a number of bytes must be whole, found {size!r}; with a unit, write 1.5GiB")
    if num_bytes < 1:
        raise UserError(f"a size must be at least one byte, found {size!r}")
    return num_bytes


def _parse_text(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise UserError(f"expected a size such as 24GiB or a number of bytes, found {size!r}")
    unit = match["unit"]
    factor = _FACTORS.get(unit.lower() or "b")
    if factor is None:
        letter = unit[0].upper()
        if letter in "KMGT" and unit.lower() in (letter.lower(), f"{letter.lower()}i"):
            number = match["number"]
            advice = f"write {number}{letter}iB (powers of 1024) or {number}{letter}B (powers of 1000)"
        else:
            advice = "units are B, KB, MB, GB, TB and KiB, MiB, GiB, TiB"
        raise UserError(f"unknown unit {unit!r} in the size {size!r}; {advice}")
    return int(Fraction(match["number"]) * factor)
