"""Beginning anew: only when every thread has ended, and never in place of a fault that came first."""

import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpft.engine.failure import EngineError, Failure
from rpft.engine.losses import Losses
from rpft.engine.streams import Event
from rpft.train.machinery import Machinery
from rpft.train.spikes import Spike


class Halfway(Machinery):
    """Without an engine: its threads end, or do not."""

    def __init__(self, ends: bool, meanwhile: tuple[BaseException, ...] = ()) -> None:
        """``meanwhile``: what threads meet while they end."""
        self.ends, self.let_go, self.meanwhile = ends, False, meanwhile
        self._failure = Failure()
        self.saver: Any = SimpleNamespace(wait=lambda: None, limit_memory=lambda num_bytes: None)

    def _end(self):
        for error in self.meanwhile:
            self._failure.set(error)
        return self.ends

    def _let_go(self, error=None):
        self.let_go = True

    def _begin_at(self, state):
        self.begun_at = state


SPIKE = Spike(range(3, 5), Path("step-00000002"))


def test_another_plan_is_not_begun_beside_threads_of_the_old_one():
    machinery = Halfway(ends=False)
    with pytest.raises(EngineError, match="did not end"):
        machinery.change_plan(SimpleNamespace(copies_bytes=0))  # type: ignore[arg-type]
    assert not machinery.let_go


def test_a_fault_that_came_before_a_spike_is_not_forgotten():
    machinery = Halfway(ends=True)
    machinery._failure.set(EngineError("it broke"))
    with pytest.raises(EngineError, match="it broke"):
        machinery.go_back(lambda: pytest.fail("the run has ended"), SPIKE)


@pytest.mark.parametrize(
    "before", [(), (torch.OutOfMemoryError("of 1 GiB"),)], ids=["with memory", "without memory"]
)
def test_nor_is_one_that_came_behind_it_or_behind_a_device_without_memory(before, caplog):
    machinery = Halfway(ends=True, meanwhile=(EngineError("it broke"), EngineError("and more")))
    for error in before:
        machinery._failure.set(error)
    with caplog.at_level("INFO"), pytest.raises(EngineError, match="it broke"):
        machinery.go_back(lambda: pytest.fail("the run has ended"), SPIKE)
    assert [text for text in caplog.messages if "it broke" in text or "and more" in text] == [
        "while every thread ends: EngineError: it broke",
        "while every thread ends: EngineError: and more",
    ]


@pytest.mark.parametrize("before", [None, torch.OutOfMemoryError("of 1 GiB")])
def test_a_run_goes_back_with_or_without_memory(before):
    machinery, state = Halfway(ends=True), object()
    if before is not None:
        machinery._failure.set(before)
    assert machinery.go_back(lambda: state, SPIKE) is state  # type: ignore[arg-type,return-value]
    assert machinery.begun_at is state
    machinery = Halfway(ends=True, meanwhile=(torch.OutOfMemoryError("of 1 GiB"),))
    assert machinery.go_back(lambda: state, SPIKE) is state  # type: ignore[arg-type,return-value]
    assert not machinery._failure.failed


def test_memory_that_the_errors_of_several_threads_hold_goes_with_the_engine():
    machinery, held = Halfway(ends=True), []
    machinery.prepared = SimpleNamespace(devices=[])  # type: ignore[assignment]

    def run_out():
        buffer = torch.empty(1)
        held.append(weakref.ref(buffer))
        try:
            raise torch.OutOfMemoryError("of 1 GiB")
        except torch.OutOfMemoryError as error:
            machinery._failure.set(error)

    run_out()
    run_out()
    Machinery._let_go(machinery)
    assert [buffer() for buffer in held] == [None, None]


class Queueing(Halfway):
    """With an engine that is given steps, none of which is over."""

    def __init__(self, delayed: bool) -> None:
        super().__init__(ends=True)
        self.prepared: Any = SimpleNamespace(delayed=delayed)
        self.watchdog: Any = SimpleNamespace(expecting=lambda what: nullcontext())
        self._engine: Any = SimpleNamespace(submit_step=self._take)
        self._last, self.taken = None, []

    def _take(self, step: int, microbatches: Any) -> Any:
        losses = Losses()
        losses.expect((1,), Event())
        self.taken.append(SimpleNamespace(step=step, losses=losses))
        return self.taken[-1]


def test_an_exact_step_is_queued_when_the_one_before_is_at_its_first_loss():
    machinery = Queueing(delayed=False)
    machinery.submit_step(1, [])
    thread = threading.Thread(target=machinery.submit_step, args=(2, []), daemon=True)
    thread.start()
    thread.join(0.05)
    assert [each.step for each in machinery.taken] == [1]
    machinery.taken[0].losses.ready[0].set()
    thread.join(30)
    assert [each.step for each in machinery.taken] == [1, 2]
    machinery._failure.set(EngineError("it broke"))
    with pytest.raises(EngineError, match="it broke"):
        machinery.submit_step(3, [])


def test_a_step_that_reads_weights_of_before_is_queued_at_once():
    machinery = Queueing(delayed=True)
    for step in (1, 2, 3):
        machinery.submit_step(step, [])
    assert len(machinery.taken) == 3
