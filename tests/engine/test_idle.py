"""The time in which a worker computed nothing is accounted for, by cause, to the last second."""

import pytest
from support.engines import plan_of, run_engine
from support.models import tiny_checkpoint

from rpft.engine.idle import CAUSES, idle_by_cause, idle_table
from rpft.engine.trace import COMPUTE, DISK, GRADIENTS, HOST, INPUT, OPTIMIZER, TASK, WAIT, WEIGHTS, Span, Trace
from rpft.engine.tracer import Tracer


def task(stream, start, end, copied_bytes=0):
    return Span("cuda:0", stream, TASK, "slot 0 (forward stage [0..1])", start, end, start, copied_bytes)


def wait(stream, cause, start, end):
    return Span("cuda:0", stream, WAIT, "wait: slot 0", start, end, start, 0, cause)


def trace_of(*spans):
    streams = ("compute", "weights up", "activations up", "activations down", "gradients down")
    return Trace([("cuda:0", stream) for stream in streams], list(spans), 0.0, 20.0)


def test_each_second_of_a_known_trace_has_its_cause():
    trace = trace_of(
        wait("compute", WEIGHTS, 0.0, 4.0),  # until 1 some were read, until 3 the optimizer had not written others
        wait("weights up", DISK, 0.0, 1.0),
        wait("weights up", OPTIMIZER, 1.0, 3.0),
        task("weights up", 3.0, 4.0, 100),
        task("compute", 4.0, 6.0),
        wait("compute", INPUT, 6.0, 9.0),  # computed elsewhere until 8
        wait("activations up", INPUT, 5.0, 8.0),
        task("activations up", 8.0, 9.0, 100),
        task("compute", 9.0, 10.0),
        task("compute", 12.0, 14.0),  # nobody launched anything before it
        wait("compute", GRADIENTS, 14.0, 17.0),  # sent down until 16; before 15 the optimizer still read
        wait("gradients down", OPTIMIZER, 14.0, 15.0),
        task("gradients down", 15.0, 17.0, 100),
        task("compute", 17.0, 19.0),
    )
    [idle] = idle_by_cause(trace)
    assert idle.busy_seconds == pytest.approx(7.0)
    assert idle.seconds == pytest.approx(
        {
            "input": 2.0,
            "input copy": 1.0,
            "weights": 1.0,
            "disk": 1.0,
            "optimizer": 3.0,
            "gradients": 2.0,
            "launch": 2.0,
            "no work": 1.0,
        }
    )
    assert idle.busy_seconds + sum(idle.seconds.values()) == pytest.approx(idle.window_seconds)


def test_what_a_worker_waits_for_the_optimizer_while_that_waits_for_the_disk_is_the_disks():
    def held(start, end):
        return Span(HOST, "optimizer", WAIT, "the update of step 1: waits for disk", start, end, start, 0, DISK)

    trace = trace_of(
        held(0.5, 2.0),
        wait("compute", WEIGHTS, 1.0, 10.0),
        wait("weights up", OPTIMIZER, 1.0, 9.0),
        held(4.0, 5.0),
        task("weights up", 9.0, 10.0, 100),
        held(8.5, 9.5),
        task("compute", 10.0, 20.0),
    )
    [idle] = idle_by_cause(trace)
    assert idle.seconds["disk"] == pytest.approx(1.0 + 1.0 + 0.5)
    assert idle.seconds["optimizer"] == pytest.approx(8.0 - 2.5)
    assert idle.seconds["weights"] == pytest.approx(1.0)


def test_the_table_has_a_row_a_worker_and_leaves_out_what_nobody_waited_for():
    heading, row = idle_table(
        idle_by_cause(trace_of(task("compute", 0.0, 15.0), wait("compute", INPUT, 15.0, 20.0)))
    )
    assert heading.split() == ["worker", "busy", "input"]
    assert row.split() == ["cuda:0", "75.0%", "25.0%"]


@pytest.mark.parametrize("update_lag", [0, 1])
def test_every_wait_of_an_engine_says_what_for_and_all_time_is_accounted_for(update_lag, tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    plan = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (0, 2)], 2, "layer")
    tracers = []

    def trace_it(engine, optimizer):
        tracers.append(Tracer([*engine.streams, optimizer.stream]))
        tracers[0].start()

    run_engine(tmp_path, plan, 2, steps=3, update_lag=update_lag, before_run=trace_it)
    trace = tracers[0].stop()
    waits = [s for s in trace.spans if s.nature == WAIT]
    assert {s.cause for s in waits if s.worker == HOST} >= {COMPUTE, GRADIENTS, WEIGHTS}
    assert [s for s in waits if not s.cause] == []
    accounts = idle_by_cause(trace)
    assert [a.worker for a in accounts] == ["cpu:0", "cpu:1"]
    for account in accounts:
        assert list(account.seconds) == list(CAUSES)
        assert min(account.seconds.values()) >= 0.0
        assert account.busy_seconds + sum(account.seconds.values()) == pytest.approx(account.window_seconds)
