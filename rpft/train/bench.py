"""How fast a prepared run is, held against what was predicted: windows of steps, timed, and one that is traced."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from rpft.engine.device import Device
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.idle import CAUSES, idle_by_cause
from rpft.engine.slot import HostBatch
from rpft.engine.trace import Trace
from rpft.engine.tracer import Tracer
from rpft.model.host_store import HostStore
from rpft.optim.host_optimizer import UpdateResult
from rpft.train.checkpoint import TrainState
from rpft.train.flight import Flight
from rpft.train.machinery import Machinery
from rpft.train.output_dir import checkpoint_folder
from rpft.train.prepare import Prepared
from rpft.train.saver import Saver

WINDOWS = 5

TIMED_RATE = 1e-9
"""Of learning: the weights stay what they are, whatever is repeated."""


class InWindows:
    """What was measured in windows of steps."""

    windows: list[float]
    """Tokens a second of each window, from rest to rest."""
    steady: list[float]
    """The same without the first step of a window, which fills the pipeline: what a long run does."""

    @property
    def tokens_per_second(self) -> float:
        """Median of the windows, drained at both ends."""
        return statistics.median(self.windows)

    @property
    def steady_tokens_per_second(self) -> float:
        """Median of the windows without what fills the pipeline."""
        return statistics.median(self.steady)


@dataclass(frozen=True)
class Measured(InWindows):
    """A run's speed and memory on so many workers, measured and predicted."""

    workers: int
    windows: list[float]
    steady: list[float]
    step_seconds: float
    """Of those, median of the windows' means."""
    predicted_tokens_per_second: float
    """In the long run."""
    bubble: float
    """Share of the workers' time in which they did not compute, of a traced window's steps."""
    predicted_bubble: float
    idle: dict[str, float]
    """That share by what was waited for; see ``rpft.engine.idle.CAUSES``."""
    hidden: float | None
    """Share of the time of transfers in which the worker computed; None where nothing was transferred."""
    limited_by: str
    """By the prediction."""
    vram_peak_bytes: int
    """Of the worker that held most. Of the CPU pool only buffers of fixed size count."""
    vram_bill_bytes: int
    allocation_retries: int
    """Of all workers in the windows; see ``Device.allocation_retries``."""
    ram_bytes: int
    """Resident in this process."""
    ram_bill_bytes: int
    skipped_steps: int
    """Steps without an update, since a gradient was not finite: they are too fast."""
    on_cuda: bool
    roof_tokens_per_second: float
    """Of all workers, by the measured layers; see ``rpft.plan.predict.roof_seconds``."""
    losses: list[float] = field(default_factory=list)
    """Of the first steps, where they were asked for: see ``compared_losses``."""

    @property
    def error(self) -> float:
        """By how much more the prediction promised, as a share of what a long run does."""
        return self.predicted_tokens_per_second / self.steady_tokens_per_second - 1

    @property
    def share_of_roof(self) -> float:
        """Of what a long run does."""
        return self.steady_tokens_per_second / self.roof_tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "steady_tokens_per_second": self.steady_tokens_per_second,
            "prediction_error": self.error,
            "share_of_roof": self.share_of_roof,
        }


def idle_machinery(prepared: Prepared, store: HostStore, failure: Failure, last_step: int = 0) -> Machinery:
    """What carries out the steps after ``last_step``, without a run around it; to be followed by ``start``.

    Its saver writes nothing as long as nobody arms it.
    """
    saver = Saver(
        checkpoint_folder(prepared.recipe),
        store,
        failure,
        lagging=prepared.delayed,
        may_make_room=False,
        before_commit=lambda: None,
    )
    return Machinery(prepared, store, saver, failure, TrainState(last_step, last_step, 0, 0, None, None, {}, {}))


def timed_steps(
    machinery: Machinery,
    steps: range,
    batches: Callable[[int], Sequence[HostBatch]],
    told: Callable[[UpdateResult, float], None] = lambda result, seconds: None,
    ahead: int | None = None,
) -> list[float]:
    """Runs ``steps``, each queued while those before compute, from rest to rest; the seconds of each.

    A step lasts from the end of the one before to that of its own update. ``told`` of each as it ends, when
    ``ahead`` more are under way, or if None as many as a run would have.
    """
    seconds, mark = [], time.perf_counter()
    ahead = ahead or machinery.steps_ahead
    for step in range(steps.start, steps.stop + ahead):
        if step < steps.stop:
            machinery.submit_step(step, batches(step))
        else:
            machinery.engine.flush()
        over = step - ahead
        if over >= steps.start:
            with machinery.watchdog.expecting(f"step {over}"):
                result = machinery.optimizer.wait(over)
            now = time.perf_counter()
            seconds.append(now - mark)
            mark = now
            told(result, seconds[-1])
    return seconds


def full_steps(prepared: Prepared, count: int) -> list[int]:
    """The first ``count`` steps of the data, again and again where there are fewer."""
    # The last may be a short one.
    there_are = max(1, prepared.data.order.num_steps - 1)
    return [1 + number % there_are for number in range(count)]


def compared_losses(prepared: Prepared, store: HostStore, steps: Sequence[int]) -> list[float]:
    """The loss of each of ``steps``, mean over trained tokens, each trained at the recipe's full learning rate.

    ``store`` has had no step, and has had them all afterwards.
    """
    recipe = prepared.recipe.with_values("train", lr_scheduler="constant", warmup_ratio=0.0)
    failure = Failure()
    machinery = idle_machinery(replace(prepared, recipe=recipe), store, failure)
    flights = [Flight(n, prepared.data.step(n)) for n in steps]
    losses: list[float] = []

    def see(result: UpdateResult, seconds: float) -> None:
        losses.append(result.loss_sum / flights[result.step - 1].trained_tokens)

    with _running(machinery, failure):
        timed_steps(machinery, range(1, 1 + len(steps)), lambda n: flights[n - 1].host_batches(), see)
    del machinery
    _reclaim(prepared.devices)
    return losses


def _reclaim(devices: Sequence[Device]) -> None:
    """Lets go of the memory of an engine that nobody holds any more; what follows may want it."""
    gc.collect()
    for device in devices:
        device.reclaim()


@contextmanager
def _running(machinery: Machinery, failure: Failure) -> Iterator[None]:
    try:
        machinery.start()
        yield
    except BaseException as error:
        failure.set(error)  # what is queued is not worth waiting for
        machinery.close(at_once=True)
        raise
    machinery.close()


def measure(
    prepared: Prepared,
    store: HostStore,
    num_steps: int,
    windows: int = WINDOWS,
    losses: Sequence[float] = (),
) -> Measured:
    """Runs the first ``num_steps`` of the data again and again: once to warm up, ``windows`` times, once traced.

    Each time one step comes before them, which fills the pipeline. The working weights are as good as unchanged
    afterwards; the moments are not. ``prepared`` must have been measured, so that there is a prediction.
    ``losses``: of the steps that ``store`` has had.
    """
    prediction = prepared.prediction()
    assert prediction is not None
    bench = _Bench(_barely_learning(prepared), store, num_steps, len(losses))
    with _running(bench.machinery, bench.failure):
        bench.window()
        Engine.settle()
        for device in prepared.devices:
            device.reset_peak()
        retries = allocation_retries(prepared.devices)
        times = [bench.window() for _ in range(windows)]
        retries = allocation_retries(prepared.devices) - retries
        vram = max(device.peak_bytes() for device in prepared.devices)
        ram = psutil.Process().memory_info().rss
        trace = bench.traced()
    tokens, skipped = bench.tokens, bench.skipped
    del bench
    _reclaim(prepared.devices)
    accounts, overlaps = idle_by_cause(trace), trace.overlap()
    seconds = sum(account.window_seconds for account in accounts)
    transfers = sum(overlap.transfer_seconds for overlap in overlaps)
    return Measured(
        workers=len(prepared.devices),
        windows=[(tokens[-1] + sum(tokens)) / sum(window) for window in times],
        steady=[sum(tokens) / sum(window[1:]) for window in times],
        step_seconds=statistics.median(statistics.mean(window[1:]) for window in times),
        predicted_tokens_per_second=prediction.tokens_per_second,
        bubble=1 - sum(account.busy_seconds for account in accounts) / seconds,
        predicted_bubble=prediction.bubble,
        idle={cause: sum(account.seconds[cause] for account in accounts) / seconds for cause in CAUSES},
        hidden=sum(overlap.hidden_seconds for overlap in overlaps) / transfers if transfers else None,
        limited_by=prediction.limited_by,
        vram_peak_bytes=vram,
        vram_bill_bytes=prepared.bill.device,
        allocation_retries=retries,
        ram_bytes=ram,
        ram_bill_bytes=prepared.bill.host,
        skipped_steps=skipped,
        on_cuda=prepared.devices[0].torch_device.type == "cuda",
        roof_tokens_per_second=prediction.roof_tokens_per_second,
        losses=list(losses),
    )


def allocation_retries(devices: Sequence[Device]) -> int:
    """Of all ``devices`` since the start; see ``Device.allocation_retries``."""
    return sum(device.allocation_retries() for device in devices)


def _barely_learning(prepared: Prepared) -> Prepared:
    """``prepared`` with a rate of learning that no number of repetitions makes unstable."""
    schedule = {"learning_rate": TIMED_RATE, "lr_scheduler": "constant", "warmup_ratio": 0.0}
    return replace(prepared, recipe=prepared.recipe.with_values("train", **schedule))


class _Bench:
    """Windows of one run."""

    def __init__(self, prepared: Prepared, store: HostStore, num_steps: int, steps_before: int) -> None:
        self.failure = Failure()
        self.machinery = idle_machinery(prepared, store, self.failure, steps_before)
        flights = [Flight(n, prepared.data.step(n)) for n in full_steps(prepared, num_steps)]
        self.tokens = [flight.tokens for flight in flights]
        """Of the steps of a window but the first, which is like the last."""
        self._batches = [flight.host_batches() for flight in flights]
        self.skipped = 0
        self._next = 1 + steps_before

    def window(self, more: int = 0) -> list[float]:
        """The seconds of a step that fills the pipeline, of one round through the data, and of ``more``."""
        first, count = self._next, len(self._batches)
        steps = range(first, first + 1 + count + more)
        self._next = steps.stop

        def batches(step: int) -> Sequence[HostBatch]:
            return self._batches[(step - first - 1) % count]

        return timed_steps(self.machinery, steps, batches, self._see)

    def traced(self) -> Trace:
        """One round through the data, in the middle of a window."""
        tracer = Tracer(self.machinery.streams())
        tracer.start()
        try:
            first = self._next
            self.window(more=1)
            trace = tracer.stop()
        except BaseException:
            tracer.drop()
            raise
        begin, end = trace.step(first + 1).start_seconds, trace.step(first + len(self._batches)).end_seconds
        return trace.between(begin, end)

    def _see(self, result: UpdateResult, seconds: float) -> None:
        self.skipped += result.skipped
