"""A worker whose layers and transfers only take time, each a length that is given: a GPU with no arithmetic in it.

The engine drives it as it drives a GPU. A stream's thread issues work to a queue and goes on, and the queue is
busy for as long as that work is said to take, whatever the processor does meanwhile. So any number of workers
compute side by side on two cores, and what a step takes longer than it should is what the engine, the interpreter
and the processor take to issue it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import Failure
from rpft.engine.queue_stream import QueueStream
from rpft.engine.streams import Delays, Stream
from rpft.engine.tracer import HostClock
from rpft.model.block_backward import Kept, Weights
from rpft.model.device_batch import DeviceBatch
from rpft.model.kept import FromForward
from rpft.optim.kernels import Part
from rpft.optim.one_pass import BoundUpdate, OnePass

_BACKWARD = 3
"""How many times as long as a forward recompute and backward take together."""


class Moment:
    """When a queue will be at some point of its order, in seconds of ``time.perf_counter``."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        """Sleeps until then."""
        left = self.at - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def query(self) -> bool:
        """Whether it is that late."""
        return self.at <= time.perf_counter()


class PausedQueue:
    """Work in order, of which nothing is known but how long it takes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._free = now, 0.0

    @property
    def end(self) -> float:
        """When all that was issued so far is done; now, if it is."""
        return max(self._free, self._now())

    def occupy(self, seconds: float) -> None:
        """Issues work that takes ``seconds``."""
        self._free = self.end + seconds

    def record_event(self) -> Moment:
        """A mark behind all that was issued so far."""
        return Moment(self.end)

    def wait_event(self, event: Any) -> None:
        """What is issued from now on starts at ``event``, a ``Moment``, or later."""
        self._free = max(self._free, event.at)


class PausedStream(QueueStream):
    """A stream that issues to a ``PausedQueue``; a transfer takes its bytes over the link's rate."""

    native: PausedQueue

    def __init__(self, name: str, failure: Failure, delays: Delays, queue: PausedQueue, link: float) -> None:
        """``link``: bytes a second."""
        self._link = link
        super().__init__(name, failure, delays, queue, HostClock())

    def stamp(self) -> float:
        return self.native.end

    def _carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
        def transfer() -> None:
            task()
            if copied_bytes:
                self.native.occupy(copied_bytes / self._link)

        super()._carry_out(transfer, what, copied_bytes)


class PausedDevice(CpuDevice):
    """A worker of ``PausedStream``s. Its memory holds no results: what is copied to it is not what it was."""

    spoils = False  # as a GPU's, which stays as it is

    def __init__(self, index: int, link: float) -> None:
        """``link``: bytes a second, of each stream of transfers."""
        super().__init__(index)
        self.compute = PausedQueue()
        self._link_rate = link

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        queue = self.compute if purpose == "compute" else PausedQueue()
        return PausedStream(f"{self.name} {purpose}", failure, delays, queue, self._link_rate)


@dataclass(frozen=True)
class Lengths:
    """What layers take, in seconds a microbatch, and what it is to issue them."""

    forward: float
    """Of a block; its recompute and backward take three times as long."""
    head: float
    """Forward, loss and backward."""
    operations: int = 0
    """Operations of torch, on a tensor of one element, that issue a forward; three times as many a backward."""


class PausedFunctions:
    """Takes the place of ``LayerFunctions``: every layer takes its time and gives zeros."""

    balanced: frozenset[int] = frozenset()
    takes_row_starts = False

    def __init__(
        self, device: PausedDevice, num_blocks: int, hidden_size: int, dtype: Any, lengths: Lengths
    ) -> None:
        self.dtype, self.head = dtype, self
        self._queue, self._num_blocks, self._lengths = device.compute, num_blocks, lengths
        self._hidden_size = hidden_size
        self._one = torch.zeros(1)

    def expect(self, num_tokens: int) -> None: ...

    def train(self, mode: bool) -> None: ...

    def _issue(self, layer: int, forwards: float) -> None:
        """Work of ``layer`` that takes so many times its forward; looking up an embedding takes no time."""
        if layer == 0:
            return
        for _ in range(round(self._lengths.operations * forwards)):
            self._one.add_(1)
        self._queue.occupy(self._lengths.forward * forwards)

    def _hidden(self, batch: DeviceBatch) -> torch.Tensor:
        return torch.zeros(*batch.input_ids.shape, self._hidden_size, dtype=self.dtype)

    def forward(
        self, layer: int, hidden: torch.Tensor | None, weights: Weights, batch: DeviceBatch, key: int | None
    ) -> torch.Tensor:
        self._issue(layer, 1)
        return self._hidden(batch)

    def keep(
        self,
        layer: int,
        hidden: torch.Tensor | None,
        weights: Weights,
        batch: DeviceBatch,
        key: int | None,
        trained: frozenset[str],
        with_grad_hidden: bool,
        with_output: bool,
        given: FromForward | None = None,
    ) -> tuple[torch.Tensor | None, Kept]:
        """As a block that runs as a graph: recomputed by its backward where nobody asks for its output."""
        if with_output:
            self._issue(layer, 1)
        left = _BACKWARD - int(with_output)
        gradient = self._hidden(batch) if with_grad_hidden else None
        output = self._hidden(batch) if with_output else None
        return output, _PausedKept(lambda: self._issue(layer, left), gradient)

    def loss_and_gradients(
        self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch, sums: Weights, key: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._issue(self._num_blocks + 1, self._lengths.head / self._lengths.forward)
        return torch.zeros(()), self._hidden(batch)


class PausedPass(OnePass):
    """An update that only takes time."""

    def __init__(self, rate: float) -> None:
        """``rate``: parameters a second."""
        super().__init__()
        self._rate = rate

    def _bind(self, parts: Sequence[Part]) -> BoundUpdate:
        seconds = sum(len(part.weights.after) for part in parts) / self._rate
        return lambda numbers, rounding_key: time.sleep(seconds)

    def _rows_square_sum(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0


class _PausedKept:
    """What a paused layer keeps for its backward."""

    def __init__(self, issue: Callable[[], None], gradient: torch.Tensor | None) -> None:
        self._issue, self._gradient = issue, gradient

    def backward(self, grad: torch.Tensor, sums: Weights) -> torch.Tensor | None:
        self._issue()
        return self._gradient
