"""The optimizer's rate: alone, and with the copies of all workers at the same time, what each leaves the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from rpft.engine.device import Device, cuda_available
from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event
from rpft.optim.one_pass import OnePass, scratch
from rpft.optim.threads import in_own_thread
from rpft.plan.profile_file import Beside

_SECONDS, _CPU_SECONDS = 0.1, 0.03
"""Of each measurement, at least."""

_REPEATS = 5
"""Of which the one in the middle counts: a machine's other work disturbs some."""

_COPIES_AHEAD = 8
"""Of each stream, before the first that counts: more than a device has in flight."""

_COPY_BYTES, _CPU_COPY_BYTES = 1 << 27, 1 << 24
"""All copies together are more than caches hold."""

_PARAMETERS, _CPU_PARAMETERS = 1 << 27, 1 << 24
"""That are updated: 1.9 and 0.2 GB with float32 moments. Servers' caches hold a good part of the lesser."""

_LONGEST_END_SECONDS = 30.0


def measured_rate(kernels: OnePass, num_parameters: int | None = None) -> float:
    """Parameters a second that ``kernels`` update while nothing is copied; ``measure_beside`` measures it, too."""
    on_cuda = cuda_available()
    num_parameters = num_parameters or _num_parameters(on_cuda)

    def measure() -> float:
        return _alone(scratch(kernels, num_parameters), _seconds(on_cuda)) * num_parameters

    return in_own_thread(measure)


def measure_beside(
    devices: Sequence[Device],
    kernels: OnePass,
    num_parameters: int | None = None,
    copy_bytes: int | None = None,
) -> tuple[float, Beside]:
    """Parameters a second that ``kernels`` update while nothing is copied, and what copies make of it.

    Copies go both ways to and from each of ``devices``, one after the other on streams as the engine has them,
    whose threads want cores too. Every run counts, since an update in training goes on for long. Takes about two
    seconds on GPUs.
    """
    on_cuda = devices[0].torch_device.type == "cuda"
    num_parameters = num_parameters or _num_parameters(on_cuda)
    copy_bytes = copy_bytes or (_COPY_BYTES if on_cuda else _CPU_COPY_BYTES)
    seconds = _seconds(on_cuda)
    failure = Failure()
    update = scratch(kernels, num_parameters)
    copies: list[_Copies] = []

    def measure() -> tuple[float, Beside]:
        alone = _alone(update, seconds)
        for each in copies:
            each.go()
        while any(each.copied < _COPIES_AHEAD * copy_bytes for each in copies):
            failure.raise_if_failed()
            time.sleep(1e-3)
        _, copied_alone = _usual_rates(None, copies, failure, seconds)
        beside, copied = _usual_rates(update, copies, failure, seconds)
        return alone * num_parameters, Beside(beside * num_parameters, copied, copied_alone)

    try:
        for device in devices:
            copies += [_Copies(device, way, copy_bytes, failure) for way in ("up", "down")]
        return in_own_thread(measure)
    finally:
        for each in copies:
            each.end()


def _num_parameters(on_cuda: bool) -> int:
    return _PARAMETERS if on_cuda else _CPU_PARAMETERS


def _seconds(on_cuda: bool) -> float:
    return _SECONDS if on_cuda else _CPU_SECONDS


def _alone(update: Callable[[], None], seconds: float) -> float:
    """Runs of ``update`` a second while nothing is copied."""
    update()  # touches its pages, and starts its threads
    return _usual_rates(update, [], Failure(), seconds)[0]


class _Copies:
    """Copies of one device one way, each queued by the one before."""

    def __init__(self, device: Device, way: str, num_bytes: int, failure: Failure) -> None:
        host = device.allocate_host(num_bytes)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)  # no memory of the worker's
        self._target, self._source = (there, host) if way == "up" else (host, there)
        self._failure, self._going = failure, True
        self._stream = device.stream(f"measured {way}", failure, Delays(None))
        self.copied = 0
        """Bytes, of copies that are done or in flight."""

    def go(self) -> None:
        self._stream.run(self._copy, "a copy beside the update", copied_bytes=self._source.nbytes)

    def _copy(self) -> None:
        if not self._going:  # the end may be queued before this
            return
        self._target.copy_(self._source, non_blocking=True)
        self.copied += self._source.nbytes
        self.go()

    def end(self) -> None:
        """Returns when the last copy is done, so that its memory can go."""
        self._going = False
        done = self._stream.record(Event())
        if self._failure.error is None:
            done.synchronize(self._failure)
        self._stream.close()
        self._stream.join(_LONGEST_END_SECONDS)


def _usual_rates(
    work: Callable[[], None] | None, copies: Sequence[_Copies], failure: Failure, seconds: float
) -> tuple[float, float]:
    """The median of several ``_rates``, of each of both."""
    runs, copied = zip(*(_rates(work, copies, failure, seconds) for _ in range(_REPEATS)), strict=True)
    return statistics.median(runs), statistics.median(copied)


def _rates(
    work: Callable[[], None] | None, copies: Sequence[_Copies], failure: Failure, at_least_seconds: float
) -> tuple[float, float]:
    """(runs of ``work``, bytes of ``copies``) a second, until each of them has done something."""
    before = [each.copied for each in copies]
    runs, started = 0, time.perf_counter()
    while True:
        if work is None:
            time.sleep(1e-3)
        else:
            work()
            runs += 1
        seconds = time.perf_counter() - started
        copied = [each.copied - bytes_before for each, bytes_before in zip(copies, before, strict=True)]
        failure.raise_if_failed()
        if seconds >= at_least_seconds and all(copied):
            return runs / seconds, sum(copied) / seconds
