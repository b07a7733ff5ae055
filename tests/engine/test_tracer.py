"""A tracer notes what streams do, in order, and changes nothing; one that is off notes nothing."""

import threading

import pytest
from support.engines import plan_of, run_engine
from support.models import tiny_checkpoint

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.trace import HOST, PART, TASK, WAIT
from rpft.engine.tracer import Tracer, span

PURPOSES = ["compute", "weights up", "activations up", "activations down", "gradients down"]


class Run:
    """Streams that can be drained."""

    def __init__(self, *names, make=Stream):
        self.failure = Failure()
        self.streams = [make(name, self.failure, Delays(None)) for name in names]

    def drain(self):
        for stream in self.streams:
            stream.record(Event()).synchronize(self.failure)

    def close(self):
        for stream in self.streams:
            stream.close()
            assert stream.join(5.0)


@pytest.fixture
def run():
    run = Run("cpu:0 compute", "cpu:0 weights up", "optimizer")
    yield run
    run.close()


def spans_of(trace, stream, nature=TASK):
    return [s for s in trace.spans if s.stream == stream and s.nature == nature]


def test_tasks_are_noted_in_order_with_their_times_and_bytes(run):
    tracer = Tracer(run.streams)
    compute, up, optimizer = run.streams
    tracer.start()
    for number in range(5):
        compute.run(lambda: sum(range(1000)), f"task {number}")
        up.run(lambda: None, f"copy {number}", copied_bytes=100 + number)
    optimizer.run(lambda: None, "the update of step 1")
    run.drain()
    trace = tracer.stop()
    assert trace.rows == [("cpu:0", "compute"), ("cpu:0", "weights up"), (HOST, "optimizer")]
    assert [s.what for s in spans_of(trace, "compute")] == [f"task {n}" for n in range(5)]
    assert [s.copied_bytes for s in spans_of(trace, "compute")] == [0] * 5
    assert [s.copied_bytes for s in spans_of(trace, "weights up")] == [100 + n for n in range(5)]
    assert [(s.worker, s.what) for s in spans_of(trace, "optimizer")] == [(HOST, "the update of step 1")]
    for stream in ("compute", "weights up", "optimizer"):
        times = [t for s in spans_of(trace, stream) for t in (s.issued_seconds, s.start_seconds, s.end_seconds)]
        assert times == sorted(times)
        assert times[0] >= 0.0
        assert times[-1] <= trace.end_seconds


def test_a_wait_is_noted_up_to_the_task_behind_it(run):
    tracer = Tracer(run.streams)
    compute, up, _ = run.streams
    waiting = threading.Event()
    tracer.start()
    up.run(lambda: waiting.wait(5.0), "slow copy")
    compute.wait(up.record(Event()))
    compute.wait(up.record(Event()))
    waiting.set()
    compute.run(lambda: None, "first")
    compute.run(lambda: None, "second")
    run.drain()
    trace = tracer.stop()
    first = spans_of(trace, "compute")[0]
    [wait] = spans_of(trace, "compute", WAIT)  # both waits stand before one task
    assert wait.what == "wait: first"
    assert wait.end_seconds == first.start_seconds
    assert wait.end_seconds >= spans_of(trace, "weights up")[0].end_seconds
    assert wait.seconds >= 0.0


def test_parts_of_a_task_lie_inside_it_and_bear_its_name(run):
    tracer = Tracer(run.streams)
    *_, optimizer = run.streams

    def update():
        for layer in range(3):
            with span(f"layer {layer}"):
                sum(range(1000))

    tracer.start()
    optimizer.run(update, "the update of step 7")
    run.drain()
    trace = tracer.stop()
    [task] = spans_of(trace, "optimizer")
    parts = spans_of(trace, "optimizer", PART)
    assert [s.what for s in parts] == [f"the update of step 7: layer {n}" for n in range(3)]
    assert {s.kind for s in parts} == {"optimizer"}
    inside = [task.start_seconds, *(t for s in parts for t in (s.start_seconds, s.end_seconds)), task.end_seconds]
    assert inside == sorted(inside)
    [use] = [use for use in trace.streams() if use.stream == "optimizer"]
    assert use.busy_seconds == pytest.approx(sum(s.seconds for s in parts))


def test_without_a_trace_nothing_is_noted_and_no_stamp_is_taken():
    stamps = []

    class Counted(Stream):
        def stamp(self):
            stamps.append(self.name)
            return super().stamp()

    def task():
        with span("part"):
            pass

    run = Run("a", "b", make=Counted)
    a, b = run.streams
    tracer = Tracer(run.streams)
    a.run(task, "before")
    b.wait(a.record(Event()))
    run.drain()
    assert stamps == []
    tracer.start()
    a.run(task, "within")
    run.drain()
    assert [s.what for s in tracer.stop().spans] == ["within: part", "within"]
    taken = len(stamps)
    assert taken == 4
    b.wait(a.record(Event()))
    b.run(task, "after")
    run.drain()
    assert len(stamps) == taken
    tracer.start()
    assert tracer.stop().spans == []
    run.close()


def test_a_task_that_fails_is_reported_as_ever_and_left_out():
    def fail():
        raise ValueError("wrong")

    run = Run("a")
    tracer = Tracer(run.streams)
    tracer.start()
    run.streams[0].run(fail, "slot 1")
    run.close()
    assert tracer.stop().spans == []
    assert "a: slot 1 failed: ValueError: wrong" in str(run.failure.error)


def test_stamps_of_a_device_get_their_times_from_its_clock_when_the_trace_is_over():
    class Device:
        """Stamps are tickets; the clock knows their times only once it has finished."""

        def __init__(self):
            self.calls, self.tickets, self.offset = [], iter(range(100)), 0.0

        def start(self):
            self.calls.append("start")
            self.offset = threading.TIMEOUT_MAX  # far from the host's own clock

        def finish(self):
            self.calls.append("finish")

        def seconds(self, stamp):
            assert self.calls[-1] == "finish"
            return self.offset + stamp

    device = Device()

    class OnDevice(Stream):
        clock = device

        def stamp(self):
            return next(device.tickets)

    run = Run("cuda:0 compute", "cuda:0 weights up", make=OnDevice)
    tracer = Tracer(run.streams)
    tracer.start()
    for number in range(3):
        run.streams[0].run(lambda: None, f"task {number}")
    run.drain()
    trace = tracer.stop()
    assert device.calls == ["start", "finish"]
    first = trace.spans[0].start_seconds
    assert [round(s.start_seconds - first) for s in trace.spans] == [0, 2, 4]
    assert [round(s.seconds) for s in trace.spans] == [1, 1, 1]
    run.close()


def test_tracing_an_engine_changes_no_bit_and_every_stream_has_its_row(tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    plan = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (0, 2)], 2, "stage")
    plain = run_engine(tmp_path, plan, 2, steps=2)
    tracers = []

    def trace_it(engine, optimizer):
        streams = [stream for worker in engine._workers for stream in worker.streams]
        tracers.append(Tracer([*streams, optimizer.stream]))
        tracers[0].start()

    traced = run_engine(tmp_path, plan, 2, steps=2, before_run=trace_it)
    assert plain.differences(traced) == []
    trace = tracers[0].stop()
    busy = {(s.worker, s.stream) for s in trace.spans if s.nature == TASK}
    assert busy == {(w, p) for w in ("cpu:0", "cpu:1") for p in PURPOSES} | {(HOST, "optimizer")}
    assert {s.kind for s in trace.spans if s.stream == "compute"} == {"forward", "fused", "backward", "loss"}
    assert [s.what[-6:] for s in spans_of(trace, "optimizer")] == ["step 1", "step 2"]
    period = trace.step(2)
    assert 0.0 < period.start_seconds < period.end_seconds <= trace.end_seconds
    for o in trace.overlap():
        assert o.compute_busy + o.only_transfers + o.idle == pytest.approx(1.0)
        assert 0.0 <= o.hidden <= 1.0


def test_waits_for_different_things_follow_one_another(run):
    tracer = Tracer(run.streams)
    compute, up, optimizer = run.streams
    first, second = threading.Event(), threading.Event()
    tracer.start()
    up.run(lambda: first.wait(5.0), "copy")
    optimizer.run(lambda: second.wait(5.0), "update")
    compute.wait(up.record(Event()), "weights")
    compute.wait(optimizer.record(Event()), "optimizer")
    compute.run(lambda: None, "task")
    first.set()
    up.record(Event()).synchronize(run.failure)
    second.set()
    run.drain()
    trace = tracer.stop()
    weights, update = spans_of(trace, "compute", WAIT)
    assert (weights.cause, update.cause) == ("weights", "optimizer")
    assert weights.end_seconds == update.start_seconds
    assert update.end_seconds == spans_of(trace, "compute")[0].start_seconds


def test_what_is_under_way_when_a_trace_ends_is_noted_up_to_there(run):
    tracer = Tracer(run.streams)
    compute, up, _ = run.streams
    begun, over = threading.Event(), threading.Event()
    tracer.start()

    def copy():
        begun.set()
        over.wait(5.0)

    up.run(copy, "copy", copied_bytes=7)
    compute.wait(up.record(Event()), "weights")
    compute.run(lambda: None, "task")
    assert begun.wait(5.0)
    while not compute.recorder._waits:
        pass
    trace = tracer.stop()
    over.set()
    run.drain()
    [under_way] = spans_of(trace, "weights up")
    assert (under_way.what, under_way.copied_bytes, under_way.end_seconds) == ("copy", 7, trace.end_seconds)
    [wait] = spans_of(trace, "compute", WAIT)
    assert (wait.cause, wait.end_seconds) == ("weights", trace.end_seconds)
    assert spans_of(trace, "compute") == []
