"""float32 numbers in two halves: the bfloat16 that is nearest, and the sixteen bits that it lacks.

A master weight is stored so beside its working weight for 4 bytes in all instead of 6, exactly: joined, the
halves are the number again, bit for bit, a NaN included. ``high`` is rounded to nearest, a tie away from zero
(torch's conversion takes the even neighbour), because the remainder then always fits sixteen bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Numbers split at once, in the cache."""


def join(high: Tensor, low: Tensor) -> Tensor:
    """float32 numbers of the halves, bfloat16 and int16 of one shape, in new memory."""
    return high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low).view(torch.float32)


def joined(stored: Sequence[Tensor]) -> Tensor:
    """The numbers that are ``stored``: whole, which are given as they are, or in two halves."""
    return join(*stored) if len(stored) == 2 else stored[0]


def split_into(high: Tensor, low: Tensor, values: Tensor) -> None:
    """Writes the halves of ``values``, float32: ``high`` bfloat16, ``low`` int16, all flat and of one length."""
    for start in range(0, len(values), _BLOCK):
        part = slice(start, start + _BLOCK)
        bits = values[part].view(torch.int32)
        upper = (bits + 0x8000).bitwise_right_shift_(16)
        high[part].view(torch.int16).copy_(upper)
        low[part].copy_(bits - upper.bitwise_left_shift_(16))
