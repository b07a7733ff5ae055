"""On CUDA a trace and a slow link change no bit; times are sane; an emulated link is never faster than asked."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.engine import cuda
from rpft.engine.cuda import CudaDevice
from rpft.engine.failure import Failure
from rpft.engine.idle import idle_by_cause
from rpft.engine.streams import Delays, Event
from rpft.engine.trace import TASK, WAIT
from rpft.engine.tracer import Tracer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (0, 2)], 2, "stage")
NUM_BYTES = 64 << 20
GBPS = 2.0
TOLERANCE = 1.1
"""The delay is counted in cycles of a clock that moves."""


def slow_worker(index: int) -> CudaDevice:
    return CudaDevice(index % torch.cuda.device_count(), None, emulate_link_gbps=0.05)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """plain(make_device) -> the outcome without a trace."""
    known = []

    def of(make_device):
        if not known:
            known.append(run_engine(checkpoint("llama"), PLAN, 2, steps=2, make_device=make_device))
        return known[0]

    return of


@pytest.mark.parametrize("slow", [False, True], ids=["the real link", "a slow link"])
def test_tracing_and_a_slow_link_change_no_bit(slow, checkpoint, make_device, plain):
    expected = plain(make_device)
    tracers, streams = [], []

    def trace_it(engine, optimizer):
        streams.extend(engine.streams)
        tracers.append(Tracer([*engine.streams, optimizer.stream]))
        tracers[0].start()

    make = slow_worker if slow else make_device
    traced = run_engine(checkpoint("llama"), PLAN, 2, steps=2, make_device=make, before_run=trace_it)
    assert expected.differences(traced) == []
    trace = tracers[0].stop()
    for row in trace.rows:
        tasks = [s for s in trace.spans if (s.worker, s.stream) == row and s.nature == TASK]
        assert tasks
        if torch.cuda.device_count() >= 2:  # else two workers share the rows of one GPU
            times = [t for s in tasks for t in (s.start_seconds, s.end_seconds)]
            assert times == sorted(times)
        # A task is done on the device after it was issued; clocks drift by less than 1 ms.
        apart = max(getattr(stream.clock, "error_seconds", 0.0) for stream in streams)
        assert all(s.end_seconds > s.issued_seconds - apart - 1e-3 for s in tasks)


def test_a_big_copy_over_an_emulated_link_is_never_faster_than_asked_and_directions_are_apart():
    device = CudaDevice(0, None, emulate_link_gbps=GBPS)
    failure = Failure()
    names = ("weights up", "activations up", "gradients down")
    streams = [device.stream(name, failure, Delays(None)) for name in names]
    host = [device.allocate_host(NUM_BYTES) for _ in names]
    on_device = [device.allocate(NUM_BYTES) for _ in names]
    torch.cuda.synchronize()
    tracer = Tracer(streams)
    tracer.start()
    for _ in range(4):
        for stream, theirs, ours in zip(streams, host, on_device, strict=True):
            down = stream is streams[-1]
            target, source = (theirs, ours) if down else (ours, theirs)
            stream.run(lambda t=target, s=source: t.copy_(s, non_blocking=True), "copy", NUM_BYTES)
    for stream in streams:
        stream.record(Event()).synchronize(failure)
    trace = tracer.stop()
    for stream in streams:
        stream.close()
        assert stream.join(5.0)

    def bytes_a_second(spans):
        lasted = max(s.end_seconds for s in spans) - min(s.start_seconds for s in spans)
        return sum(s.copied_bytes for s in spans) / lasted

    copies = [s for s in trace.spans if s.nature == TASK]
    up = [s for s in copies if s.stream != "gradients down"]
    down = [s for s in copies if s.stream == "gradients down"]
    assert len(up) == 8  # two streams that share the rate of one direction
    assert len(down) == 4
    assert bytes_a_second(up) < GBPS * 1e9 * TOLERANCE
    assert bytes_a_second(down) < GBPS * 1e9 * TOLERANCE
    # In turns with the 8 copies up the 4 down could not be over before the 7th one up is.
    assert max(s.end_seconds for s in down) < sorted(s.end_seconds for s in up)[6]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_short_copy_comes_between_the_parts_of_a_long_one(way):
    device, failure = CudaDevice(0, None), Failure()
    long, short = (device.stream(f"{what} {way}", failure, Delays(None)) for what in ("weights", "activations"))
    host, there = device.allocate_host(1 << 30).fill_(7), device.allocate(1 << 30).zero_()
    few, few_there = device.allocate_host(1 << 20).fill_(3), device.allocate(1 << 20).zero_()
    if way == "down":
        host, there, few, few_there = there.fill_(7), host.zero_(), few_there.fill_(3), few.zero_()
    torch.cuda.synchronize()
    begun, all_there, few_are_there = Event(), Event(), Event()
    long.record(begun)
    long.copy_giving_way(there, host, "weights")
    long.record(all_there)
    begun.synchronize(failure)
    short.copy(few_there, few, "a hidden state")
    short.record(few_are_there).synchronize(failure)
    assert not all_there.complete, "1 GiB takes 20 ms or more, one part of it a sixteenth of that"
    all_there.synchronize(failure)
    assert bool((there == 7).all())
    assert bool((few_there == 3).all())
    for stream in (long, short):
        stream.close()
        assert stream.join(5.0)


def test_no_link_is_emulated_unless_asked_for(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a link was emulated")

    monkeypatch.setattr(cuda, "EmulatedLink", refuse)
    device = CudaDevice(0, None)
    failure = Failure()
    stream = device.stream("weights up", failure, Delays(None))
    host, there = device.allocate_host(4096).fill_(7), device.allocate(4096)
    torch.cuda.synchronize()
    stream.run(lambda: there.copy_(host, non_blocking=True), "copy", 4096)
    stream.record(Event()).synchronize(failure)
    stream.close()
    assert stream.join(5.0)
    assert int(there.sum()) == 7 * 4096


def test_a_trace_of_one_step_in_mid_run_changes_no_bit_and_accounts_for_all_time(checkpoint, make_device, plain):
    """As the live display takes it: started and stopped while the engine has work, from the main thread."""
    expected = plain(make_device)
    found = []

    def trace_it(engine, optimizer):
        tracer, wait = Tracer([*engine.streams, optimizer.stream]), optimizer.wait

        def waited(step):
            result = wait(step)
            if step == 1:
                tracer.start()
            elif step == 2:
                found.append(tracer.stop())
            return result

        optimizer.wait = waited

    traced = run_engine(checkpoint("llama"), PLAN, 2, steps=2, make_device=make_device, before_run=trace_it)
    assert expected.differences(traced) == []
    [trace] = found
    assert [s for s in trace.spans if s.nature == WAIT and not s.cause] == []
    for account in idle_by_cause(trace):
        assert min(account.seconds.values()) >= 0.0
        assert account.busy_seconds > 0.0
        if torch.cuda.device_count() >= 2:  # else two workers share the rows of one GPU
            total = account.busy_seconds + sum(account.seconds.values())
            assert total == pytest.approx(account.window_seconds, rel=0.01)
