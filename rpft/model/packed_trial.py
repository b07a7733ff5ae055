"""Whether blocks give the same over packed rows by variable lengths as by masks, tried on a few tokens."""

from __future__ import annotations

import torch

from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.packed_attention import NAME, Unfit, register, row_starts

_LENGTHS = ((40, 24), (17, 47))
"""Rows of the lines on which masks and starts are compared."""

_ALLOWED = 0.2
"""Of what the masks change in a block's output, how much may come out otherwise: half precision makes some."""


def adopt(functions: LayerFunctions) -> str | None:
    """Makes ``functions`` run packed rows by variable lengths; or leaves it with masks, and says why.

    All kinds of blocks are tried on a few tokens and must give what they give with masks.
    """
    register()
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _LENGTHS])
    ids = torch.zeros_like(positions).to(functions.device)
    nothing = torch.empty(0, dtype=torch.long)
    packed = DeviceBatch(
        ids, positions.to(functions.device), nothing, nothing, row_starts(positions).to(ids.device)
    )
    plain = DeviceBatch(ids, None, nothing, nothing)
    before = functions.attention
    masked, apart = functions.sample_blocks(packed), functions.sample_blocks(plain)
    functions.attend_by(NAME)
    try:
        found = functions.sample_blocks(packed)
    except (Unfit, RuntimeError) as error:
        functions.attend_by(before)
        return str(error).splitlines()[0]
    for number, (a, b, c) in enumerate(zip(found, masked, apart, strict=True)):
        if not (a - b).norm() <= _ALLOWED * (c - b).norm():
            functions.attend_by(before)
            return f"blocks of kind {number} give other numbers by it"
    return None
