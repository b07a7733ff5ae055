"""What each layer takes on a device, measured: seconds and memory of forward and backward for one microbatch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from rpft.model.blocks import Kept
from rpft.model.functions import DeviceBatch, LayerFunctions
from rpft.model.layout import LayerLayout

_TIMED_RUNS = 5
_LINK_BYTES = 1 << 28


@dataclass(frozen=True)
class LayerProfile:
    """One layer and one microbatch. Bytes are on top of weights, inputs and gradient sums."""

    forward_seconds: float
    backward_seconds: float
    """With the recompute; of the head, all of it."""
    forward_bytes: int
    """Most held at once in the forward, its output included."""
    backward_bytes: int
    """Most held at once in recompute and backward as one."""
    kept_bytes: int = 0
    """What a forward leaves for a backward that recomputes next to nothing, with its output."""
    kept_backward_bytes: int = 0
    """Most held at once in that backward, on top of what is kept; or in its forward, if that is more."""
    keep_options: tuple[tuple[int, float], ...] = ((0, 1.0),)
    """Of a block: (bytes a token that its forward could keep on the host, share of the backward then left)."""


def measure_layers(
    functions: LayerFunctions,
    layouts: list[LayerLayout],
    rows: int,
    sequence: int,
    vocabulary: int,
    *,
    dropout: bool = False,
    packed: bool = False,
) -> list[LayerProfile]:
    """A profile a layer, with random weights and tokens on the device of ``functions``; bytes only on CUDA.

    Blocks of one kind are measured once. Every token is trained, which is the most that a microbatch can ask for.
    ``dropout``: whether the model draws any; ``packed``: whether lines hold several rows and so need a mask.
    """
    device = functions.device
    ids = torch.randint(0, vocabulary, (rows, sequence), device=device)
    positions = (
        torch.arange(sequence, device=device).remainder(max(1, sequence // 2)).expand(rows, -1).contiguous()
    )
    scored = torch.arange(rows * sequence, device=device)
    batch = DeviceBatch(ids, positions if packed else None, scored, ids.flatten())
    functions.train(True)
    hidden_size = functions.hidden_size
    hidden = torch.randn(rows, sequence, hidden_size, device=device, dtype=functions.dtype)
    known: dict[int, LayerProfile] = {}
    profiles = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for layout in layouts:
            kind = functions.kind_of(layout.layer)
            if kind not in known:
                known[kind] = _measure_layer(functions, layout, hidden, batch, 0 if dropout else None)
            profiles.append(known[kind])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return profiles


def measure_link(device: torch.device, allocate_host: Callable[[int], torch.Tensor]) -> tuple[float, float]:
    """Bytes a second from host memory of ``allocate_host`` to ``device`` and back, one way at a time."""
    host = allocate_host(_LINK_BYTES)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        up = _seconds(device, lambda: there.copy_(host, non_blocking=True))
        down = _seconds(device, lambda: host.copy_(there, non_blocking=True))
    return _LINK_BYTES / up, _LINK_BYTES / down


def _measure_layer(
    functions: LayerFunctions, layout: LayerLayout, hidden: torch.Tensor, batch: DeviceBatch, key: int | None
) -> LayerProfile:
    layer, device = layout.layer, functions.device
    buffer = torch.empty(layout.region_bytes // 2, dtype=torch.bfloat16, device=device)
    buffer = buffer.normal_(0, 0.02).view(torch.uint8)  # tensors of other types then hold some other numbers
    weights = {b.name: b.view_in(buffer, b.byte_offset).data for b in layout.bindings}
    sums = {b.name: torch.zeros(b.shape, device=device) for b in layout.bindings if b.grad_offset is not None}
    trained = frozenset(sums)
    grad = torch.full_like(hidden, 1e-3)
    if layer == functions.num_blocks + 1:

        def loss() -> object:
            return functions.head.loss_and_gradients(hidden, weights, batch, sums, key)

        seconds = _seconds(device, loss)
        return LayerProfile(seconds / 4, seconds, 0, _peak_bytes(device, loss))
    given = None if layer == 0 else hidden

    def forward() -> object:
        return functions.forward(layer, given, weights, batch, key)

    def keep(with_output: bool = True) -> tuple[torch.Tensor | None, Kept]:
        return functions.keep(layer, given, weights, batch, key, trained, layer > 0, with_output)

    def backward() -> object:
        return keep(with_output=False)[1].backward(grad, sums)

    forward_seconds, forward_bytes = _seconds(device, forward), _peak_bytes(device, forward)
    if layer == 0 and not trained:
        return LayerProfile(forward_seconds, 0.0, forward_bytes, 0)
    backward_seconds, backward_bytes = _seconds(device, backward), _peak_bytes(device, backward)
    keep()[1].backward(grad, sums)  # warm
    before = _allocated(device)
    kept = keep()
    kept_bytes = _allocated(device) - before
    in_backward = _peak_bytes(device, partial(kept[1].backward, grad, sums))
    del kept
    in_forward = _peak_bytes(device, keep) - kept_bytes
    most = max(in_backward, in_forward)
    options: list[tuple[int, float]] = [(0, 1.0)]
    if given is not None:
        tokens = hidden.shape[0] * hidden.shape[1]
        options = [
            (-(-size // tokens), share) for size, share in functions.keep_options(layer, given, weights, batch)
        ]
    return LayerProfile(
        forward_seconds, backward_seconds, forward_bytes, backward_bytes, kept_bytes, most, tuple(options)
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of ``work``, warm."""
    for _ in range(2):
        work()
    marks = []
    for number in range(_TIMED_RUNS + 1):
        if number:
            work()
        marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(_between(a, b) for a, b in pairwise(marks))


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


def _peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Device memory that ``work`` holds at most at once beyond what is held before; 0 on the CPU."""
    before = _allocated(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
