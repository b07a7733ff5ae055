"""The 8-bit numbers of block-wise quantised values, and the way to the nearest one.

The dynamic maps of Dettmers et al., arXiv 2110.02861: seven decades below 1, a decade with twice the values of the
one under it, each in the middle of an equal part of its decade; 0; and 1, which a block's largest value has. The
signed map has the decades twice, the unsigned one twice as many values a decade instead.

One departure: an unsigned value that is not zero is never taken for zero. A second moment that is lost in this way
leaves its first moment over eps alone, and one such update can be thousands of times too large.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NUM_VALUES = 256

_DECADES = 7

_KEPT_BITS = 16
"""Lower bits of a float32 that an entry of ``search_table`` decides by; the upper ones choose the entry."""

_LEAST, _MOST = ((127 - 22) << 7), (127 << 7)
"""The upper bits of 2^-22, below which nothing is told apart, and of 1."""


@functools.cache
def values(signed: bool) -> Tensor:
    """What the numbers 0 to 255 stand for, float32: from 0 up, then, in the signed map, from the least up to 0.

    So a zeroed byte is 0, as it is between tensors, and a negative number is its value's in two's complement.
    """
    found = _magnitudes(signed)
    return torch.cat([found, -found[1:-1].flip(0)]) if signed else found


@functools.cache
def _magnitudes(signed: bool) -> Tensor:
    """The values from 0 to 1: 129 of the signed map, all of the unsigned one."""
    found = [torch.zeros(1)]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        found.append(10.0 ** (decade - _DECADES + 1) * ((edges[:-1] + edges[1:]) / 2))
    return torch.cat([*found, torch.ones(1)])


@functools.cache
def _thresholds(signed: bool) -> Tensor:
    """Between two neighbours of ``_magnitudes``: what is above is nearer to the upper one."""
    found = _magnitudes(signed)
    middles = (found[:-1] + found[1:]) / 2
    if not signed:
        middles[0] = 0.0
    return middles


def nearest(scaled: Tensor, signed: bool) -> Tensor:
    """The numbers, uint8, of the values nearest to ``scaled``, float32 from -1 or 0 to 1."""
    count = torch.bucketize(scaled.abs(), _thresholds(signed))
    if signed:
        count = torch.where(scaled < 0, NUM_VALUES - count.clamp(max=NUM_VALUES // 2 - 1), count) % NUM_VALUES
    return count.to(torch.uint8)


@functools.cache
def search_table(signed: bool) -> Tensor:
    """int32: for the upper bits of a magnitude from 2^-22 to 1, how many values lie below, and where the next is.

    An entry has that count above ``_KEPT_BITS`` bits, which the magnitude's lower bits must exceed for one more;
    no entry has two thresholds. The first is for all that is smaller.
    """
    bits = _thresholds(signed).view(torch.int32)
    entries = torch.arange(_LEAST, _MOST + 1, dtype=torch.int32)
    below = torch.bucketize(entries << _KEPT_BITS, bits)
    above = torch.bucketize((entries << _KEPT_BITS) + 0xFFFF, bits)
    assert int((above - below).max()) == 1
    inside = bits[below.clamp(max=len(bits) - 1)] & 0xFFFF
    low = torch.where(above > below, inside, 0xFFFF)
    first = torch.tensor([(0 if signed else 1) << _KEPT_BITS | 0xFFFF])
    return torch.cat([first, below << _KEPT_BITS | low]).to(torch.int32)
