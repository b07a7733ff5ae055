"""Dropout as a pure function of its place: (seed, step, microbatch, layer, call) gives the mask, on any worker.

torch draws dropout from a generator that belongs to the device or the process, so that a recompute on another
worker would draw another mask. Inside ``placed_dropout`` every ``torch.nn.functional.dropout`` of the calling
thread, and the dropout inside scaled dot product attention, is drawn by a counter-based hash instead. The
arithmetic is integer, so that the CPU and CUDA draw the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_MASK_64 = (1 << 64) - 1
_KEEP_BITS = 24
"""A draw compares this many bits, so the rate of dropout is exact to 6e-8."""


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64 finaliser over a running state): equal inputs, equal key."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK_64)) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


Key = tuple[int, int] | tuple[torch.Tensor, torch.Tensor]
"""The low and high 32 bits of the key of one dropout; int64 scalars inside a traced graph."""


def halves(key: int) -> tuple[int, int]:
    """A 64-bit key as a ``Key``."""
    return key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF


def keep_mask(shape: torch.Size, p: float, key: Key, device: torch.device) -> torch.Tensor:
    """Boolean mask of ``shape``, True with probability ``1 - p``; element i depends on (key, i) only."""
    drawn = draws(torch.arange(math.prod(shape), dtype=torch.int64, device=device), key)
    threshold = round(p * (1 << _KEEP_BITS))
    return ((drawn & ((1 << _KEEP_BITS) - 1)) >= threshold).view(shape)


def draws(places: torch.Tensor, key: Key) -> torch.Tensor:
    """32 random bits for each of ``places``, int64 like these; each depends on its own place and ``key`` only."""
    # 32-bit multiplicative rounds in int64: products stay under 2**63, so no overflow differs between devices.
    low, high = key
    x = ((places & 0xFFFFFFFF) ^ low) + (places >> 32) * 0x9E37
    for multiplier, salt in ((0x7FEB352D, high), (0x2C1B3C6D, low), (0x297A2D39, high)):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * multiplier & 0xFFFFFFFF
        x = x ^ (x >> 15) ^ salt
    return x


class _PlacedDropout(TorchFunctionMode):
    def __init__(self, key_of_call: Callable[[int], Key]) -> None:
        """``key_of_call``: the key of the n-th dropout that is drawn, from 1."""
        super().__init__()
        self._key_of_call, self.calls = key_of_call, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_p(*args, **kwargs) > 0.0:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        self.calls += 1
        keep = keep_mask(input.shape, p, self._key_of_call(self.calls), input.device)
        return torch.where(keep, input / (1.0 - p), 0.0)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention written out, [batch, heads, sequence, head size]: no fused kernel takes a mask of draws."""
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, -torch.inf)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -torch.inf)
            else:
                scores = scores + attn_mask
        weights = torch.softmax(scores.float(), -1).to(query.dtype)
        return self._dropout(weights, dropout_p) @ value


def _dropout_p(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
) -> float:
    """The rate that a call of scaled dot product attention asks for, given by place or by name."""
    return dropout_p


@contextmanager
def placed_dropout(place: int | None) -> Iterator[None]:
    """Draws every dropout of this thread from ``place`` and the order of calls; None leaves torch alone."""
    if place is None:
        yield
        return
    with _PlacedDropout(lambda call: halves(mix(place, call))):
        yield


@contextmanager
def drawn_dropout(keys: torch.Tensor) -> Iterator[None]:
    """As ``placed_dropout`` with the keys of its calls given as a tensor, see ``draw_keys``: for traced graphs."""
    with _PlacedDropout(lambda call: (keys[call - 1, 0], keys[call - 1, 1])):
        yield


@contextmanager
def counted_dropout() -> Iterator[Callable[[], int]]:
    """Gives a function that tells how many dropouts have been drawn inside."""
    mode = _PlacedDropout(lambda call: (0, 0))
    with mode:
        yield lambda: mode.calls


def draw_keys(place: int, count: int) -> torch.Tensor:
    """The keys of the first ``count`` dropouts under ``placed_dropout(place)``, int64 [count, 2]."""
    return torch.tensor([halves(mix(place, call)) for call in range(1, count + 1)], dtype=torch.int64)
