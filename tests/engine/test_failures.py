"""One fault anywhere ends every thread, and the error says where."""

import threading
import time

import pytest
from support.engines import plan_of, random_batches, run_engine

from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import EngineError
from rpft.engine.streams import Stream

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")


class Broken(Exception):
    pass


def raise_at(number, error):
    """A function that raises ``error`` at its call of that number, from 0."""
    calls = iter(range(1_000_000))
    moment = []

    def count():
        if next(calls) == number:
            moment.append(time.monotonic())
            raise error

    count.moment = moment
    return count


class FaultyStream(Stream):
    def __init__(self, name, failure, delays, fault):
        super().__init__(name, failure, delays)
        self.fault = fault

    def run(self, task, what, copied_bytes=0):
        def faulty():
            self.fault()
            task()

        super().run(faulty, what, copied_bytes)


class FaultyDevice(CpuDevice):
    """Its stream ``purpose`` raises in a task."""

    def __init__(self, index, purpose, fault):
        super().__init__(index)
        self.purpose, self.fault = purpose, fault

    def stream(self, purpose, failure, delays):
        if purpose == self.purpose:
            return FaultyStream(f"{self.name} {purpose}", failure, delays, self.fault)
        return super().stream(purpose, failure, delays)


def engine_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("cpu:") or t.name == "optimizer"]


def fails(folder, fault, **settings):
    """Runs until the fault; the error, after checking that every thread ended in time."""
    assert engine_threads() == []
    with pytest.raises(EngineError) as caught:
        run_engine(folder, PLAN, 2, microbatches=4, **settings)
    assert fault.moment, "the fault was never reached"
    while engine_threads():
        assert time.monotonic() < fault.moment[0] + 5.0, engine_threads()
        time.sleep(0.02)
    return caught.value


@pytest.mark.parametrize("kind", [Broken("it broke"), SystemExit("thread dies"), MemoryError("no more")])
@pytest.mark.parametrize(
    ("layer", "worker", "call", "stage"),
    [(1, 0, 1, "forward stage [0..1]"), (4, 0, 1, "fused stage [4..5]"), (2, 1, 3, "backward stage [2..3]")],
)
def test_a_fault_in_a_layer_ends_every_thread_and_names_stage_microbatch_and_device(
    layer, worker, call, stage, kind, checkpoint
):
    fault = raise_at(call, kind)

    def sabotage(engine, optimizer):
        for number, owner in enumerate(engine._workers):
            for name in ("forward", "keep"):
                function = getattr(owner._functions, name)

                def faulty(index, *args, owner=number, function=function, **named):
                    if (index, owner) == (layer, worker):
                        fault()
                    return function(index, *args, **named)

                setattr(owner._functions, name, faulty)

    error = fails(checkpoint("llama"), fault, before_run=sabotage)
    assert f"cpu:{worker} compute" in str(error)
    assert stage in str(error)
    assert "microbatch 1" in str(error)
    assert str(kind) in str(error)
    assert error.__cause__ is kind


@pytest.mark.parametrize("kind", [Broken("it broke"), SystemExit("thread dies")])
@pytest.mark.parametrize(
    ("purpose", "names"),
    [
        ("compute", "slot"),
        ("weights up", "weights"),
        ("activations up", "microbatch"),
        ("activations down", "microbatch"),
        ("gradients down", "gradients"),
    ],
)
def test_a_fault_in_any_stream_ends_every_thread_and_names_the_slot(purpose, names, kind, checkpoint):
    fault = raise_at(3, kind)
    error = fails(checkpoint("llama"), fault, make_device=lambda index: FaultyDevice(index, purpose, fault))
    assert purpose in str(error)
    assert "cpu:" in str(error)
    assert "stage [" in str(error)
    assert names in str(error)
    assert error.__cause__ is kind


@pytest.mark.parametrize("update_lag", [0, 1])
@pytest.mark.parametrize("kind", [Broken("it broke"), SystemExit("thread dies")])
def test_a_fault_in_the_optimizer_ends_every_thread_and_names_the_step(kind, update_lag, checkpoint):
    fault = raise_at(1, kind)

    def sabotage(engine, optimizer):
        apply = optimizer._write_layer

        def faulty(update, index, *args):
            if index == 2:
                fault()
            return apply(update, index, *args)

        optimizer._write_layer = faulty

    error = fails(checkpoint("llama"), fault, before_run=sabotage, update_lag=update_lag)
    assert "optimizer" in str(error)
    assert "step 2" in str(error)
    assert error.__cause__ is kind


def test_whoever_waits_for_a_step_or_an_evaluation_gets_the_first_fault(checkpoint):
    seen = []
    fault = raise_at(0, Broken("it broke"))

    def sabotage(engine, optimizer):
        engine._workers[0]._functions.forward = lambda *args: fault()
        for call in (
            lambda: engine.evaluate(random_batches(2, seed=1)),
            lambda: engine.submit_step(1, random_batches(2, seed=1)),
            lambda: optimizer.wait(1),
        ):
            with pytest.raises(EngineError, match="it broke") as caught:
                call()
            seen.append(caught.value)

    with pytest.raises(EngineError):
        run_engine(checkpoint("llama"), PLAN, 2, before_run=sabotage)
    assert seen[0] is seen[1] is seen[2]


def test_after_success_no_thread_is_left(checkpoint):
    run_engine(checkpoint("llama"), PLAN, 3, steps=1)
    assert engine_threads() == []
