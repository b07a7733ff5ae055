"""What each layer takes on a device, measured: seconds and memory of forward and backward for one microbatch."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from rpft.model.block_backward import Kept
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.layout import LayerLayout
from rpft.model.packed_attention import row_starts
from rpft.model.router_loss import LOSS, WEIGHT

T = TypeVar("T")

_TIMED_RUNS = 5
_MOST_TIMED_RUNS = 200
_WARM_SECONDS, _TIMED_SECONDS = 0.7, 0.3
"""On a GPU, which draws its full power for so long before it slows down to what it can go on with."""

_LINK_BYTES = 1 << 28
_MOST_WAITED_SECONDS = 60
"""For another device that fails before its copy."""


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
    kept_seconds: float | None = None
    """A forward that leaves everything and its backward, where as two graphs they take longer than as one."""

    @property
    def fused_seconds(self) -> float:
        """What the layer takes in the fused stage."""
        return self.backward_seconds if self.kept_seconds is None else self.kept_seconds


class Gauge(Protocol):
    """What layers are measured with."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of ``work``, warm; its graphs are made before ``run`` is called."""
        ...

    def warm(self, work: Callable[[], object]) -> None:
        """Makes the graphs of ``work``, which is not timed."""
        ...

    def run(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """(What ``work`` gives, bytes that it held at most at once, bytes held after it), beyond those before."""
        ...


class OnDevice:
    """The clock and the allocator of a device; bytes only on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """See ``Gauge``."""
        return _seconds(self._device, work)

    def warm(self, work: Callable[[], object]) -> None:
        """See ``Gauge``."""
        work()

    def run(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """See ``Gauge``."""
        if self._device.type != "cuda":
            return work(), 0, 0
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = work()
        torch.cuda.synchronize(self._device)
        most, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        return result, most - before, after - before


class LayerMeter:
    """Measures layers with random weights and tokens on the device of ``functions``.

    Every token is trained, which is the most that a microbatch can ask for.
    """

    def __init__(
        self,
        functions: LayerFunctions,
        layouts: list[LayerLayout],
        rows: int,
        sequence: int,
        vocabulary: int,
        *,
        dropout: bool = False,
        row_tokens: int | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        """``dropout``: whether the model draws any; ``row_tokens``: of packed rows; None: one a line."""
        device = functions.device
        ids = torch.randint(0, vocabulary, (rows, sequence), device=device)
        scored = torch.arange(rows * sequence, device=device)
        self.functions, self.layouts = functions, layouts
        self._gauge = OnDevice(device) if gauge is None else gauge
        at = starts = None
        if row_tokens is not None:
            positions = torch.arange(sequence).remainder(row_tokens).repeat(rows, 1)
            at, starts = positions.to(device), row_starts(positions).to(device)
        self._batch = DeviceBatch(ids, at, scored, ids.flatten(), starts)
        self._shape = rows, sequence
        self._key = 0 if dropout else None
        functions.expect(rows * sequence)
        functions.train(True)

    def context(self) -> object:
        """What blocks are given beside hidden states, made once."""
        return self.functions.context(self._batch)

    def measure(self, layer: int) -> LayerProfile:
        """The profile of ``layer``."""
        device = self.functions.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            hidden = self.functions.example_input(layer, *self._shape)
            given = self.functions, self.layouts[layer], hidden, self._batch, self._key
            return _measure_layer(*given, self._gauge)


def layers_by_kind(functions: LayerFunctions, num_layers: int) -> list[tuple[int, ...]]:
    """Layers of one code and the same shapes together, in the order of their first layers."""
    kinds: dict[int, list[int]] = {}
    for layer in range(num_layers):
        kinds.setdefault(functions.kind_of(layer), []).append(layer)
    return [tuple(layers) for layers in kinds.values()]


def memory_measured(profiles: Sequence[LayerProfile]) -> bool:
    """Whether ``profiles`` have bytes: on the CPU only time is measured."""
    return any(profile.backward_bytes for profile in profiles)


def measure_link(
    device: torch.device, allocate_host: Callable[[int], torch.Tensor], num_bytes: int = _LINK_BYTES
) -> tuple[float, float]:
    """Bytes a second from host memory of ``allocate_host`` to ``device`` and back, one way at a time."""
    host = allocate_host(num_bytes)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        up = _seconds(device, lambda: there.copy_(host, non_blocking=True))
        down = _seconds(device, lambda: host.copy_(there, non_blocking=True))
    return num_bytes / up, num_bytes / down


def measure_links_together(
    devices: Sequence[torch.device], allocate_host: Callable[[int], torch.Tensor], num_bytes: int = _LINK_BYTES
) -> list[tuple[float, float]]:
    """As ``measure_link``, for each of several devices while all of them copy the same way at once."""
    hosts = [allocate_host(num_bytes) for _ in devices]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices]
    rates = []
    for targets, sources in ((there, hosts), (hosts, there)):
        ready = threading.Barrier(len(devices))
        with ThreadPoolExecutor(len(devices), "link") as pool:
            seconds = list(pool.map(partial(_copy_at_once, ready), devices, targets, sources))
        rates.append([num_bytes / each for each in seconds])
    return list(zip(*rates, strict=True))


def _copy_at_once(
    ready: threading.Barrier, device: torch.device, target: torch.Tensor, source: torch.Tensor
) -> float:
    """Seconds of a copy that begins when all are ready, mean of some in a row."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        target.copy_(source, non_blocking=True)
        _finish(device)
        ready.wait(_MOST_WAITED_SECONDS)
        started = time.perf_counter()
        for _ in range(_TIMED_RUNS):
            target.copy_(source, non_blocking=True)
        _finish(device)
        return (time.perf_counter() - started) / _TIMED_RUNS


def measure_slowdown(meters: Sequence[LayerMeter], layer: int) -> float:
    """How many times as long a forward and backward of ``layer`` takes while all ``meters`` work at once.

    That is what the stand-ins of the CPU pool do to one another, which share the cores.
    """

    def seconds(meter: LayerMeter) -> float:
        profile = meter.measure(layer)
        return profile.forward_seconds + profile.backward_seconds

    alone = statistics.mean(map(seconds, meters))  # which also makes their graphs
    with ThreadPoolExecutor(len(meters), "worker") as pool:
        together = list(pool.map(seconds, meters))
    return max(1.0, statistics.mean(together) / alone)


def measure_host_memory(num_bytes: int = _LINK_BYTES) -> float:
    """Bytes a second, read and written, of a copy within the host's memory by torch's threads."""
    source, target = (torch.ones(num_bytes // 4, dtype=torch.float32) for _ in range(2))
    return 2 * num_bytes / _seconds(torch.device("cpu"), lambda: target.copy_(source))


def _measure_layer(
    functions: LayerFunctions,
    layout: LayerLayout,
    hidden: torch.Tensor,
    batch: DeviceBatch,
    key: int | None,
    gauge: Gauge,
) -> LayerProfile:
    layer, device = layout.layer, functions.device
    buffer = torch.empty(layout.region_bytes // 2, dtype=torch.bfloat16, device=device)
    buffer = buffer.normal_(0, 0.02).view(torch.uint8)  # tensors of other types then hold some other numbers
    weights = {b.name: b.view_in(buffer, b.byte_offset).data for b in layout.bindings}
    sums = {b.name: torch.zeros(b.shape, device=device) for b in layout.bindings if b.grad_offset is not None}
    trained = frozenset(sums)
    if layer in functions.balanced:
        sums |= {name: torch.zeros((), device=device) for name in (LOSS, WEIGHT)}
    if layer == functions.head_layer:

        def loss() -> object:
            return functions.head.loss_and_gradients(hidden, weights, batch, sums, key)

        seconds = gauge.seconds(loss)
        return LayerProfile(seconds / 4, seconds, 0, gauge.run(loss)[1])
    given = None if layer == 0 else hidden
    grad = hidden.new_empty(*hidden.shape[:-1], functions.input_width(layer + 1))
    grad.normal_(0, 1e-3)  # equal numbers draw less power, and take less time

    def forward() -> object:
        if given is not None and layout.choices:  # as in training, whose graph is another than that of evaluations
            return functions.forward_keeping(layer, given, weights, batch, key, True, 0)
        return functions.forward(layer, given, weights, batch, key)

    def keep(with_output: bool = True) -> tuple[torch.Tensor | None, Kept]:
        return functions.keep(layer, given, weights, batch, key, trained, layer > 0, with_output)

    def backward() -> object:
        return keep(with_output=False)[1].backward(grad, sums)

    def kept_apart() -> object:
        return keep()[1].backward(grad, sums)

    forward_seconds, forward_bytes = gauge.seconds(forward), gauge.run(forward)[1]
    if layer == 0 and not trained:
        return LayerProfile(forward_seconds, 0.0, forward_bytes, 0)
    backward_seconds, backward_bytes = gauge.seconds(backward), gauge.run(backward)[1]
    gauge.warm(kept_apart)
    kept, in_forward, kept_bytes = gauge.run(keep)
    _, in_backward, _ = gauge.run(partial(kept[1].backward, grad, sums))
    del kept
    most = max(in_backward, in_forward - kept_bytes)
    options: list[tuple[int, float]] = [(0, 1.0)]
    if given is not None:
        tokens = hidden.shape[0] * hidden.shape[1]
        options = [
            (-(-size // tokens), share) for size, share in functions.keep_options(layer, given, weights, batch)
        ]
    return LayerProfile(
        forward_seconds,
        backward_seconds,
        forward_bytes,
        backward_bytes,
        kept_bytes,
        most,
        tuple(options),
        gauge.seconds(kept_apart) if len(options) > 1 else None,
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of ``work``, warm, as long runs of it take on a GPU."""
    runs = _TIMED_RUNS
    for _ in range(2):
        work()
    if device.type == "cuda":
        one = _median_seconds(device, work, 3)
        for _ in range(min(_MOST_TIMED_RUNS, int(_WARM_SECONDS / one))):
            work()
        runs = max(runs, min(_MOST_TIMED_RUNS, int(_TIMED_SECONDS / one)))
    return _median_seconds(device, work, runs)


def _median_seconds(device: torch.device, work: Callable[[], object], runs: int) -> float:
    marks = []
    for number in range(runs + 1):
        if number:
            work()
        marks.append(_mark(device))
    _finish(device)
    return statistics.median(_between(a, b) for a, b in pairwise(marks))


def _finish(device: torch.device) -> None:
    """Returns when what was given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000
