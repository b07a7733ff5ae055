"""On CUDA a trace changes no bit and has sane times; an emulated link gives each direction the rate asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import plan_of, run_engine
from support.models import tiny_checkpoint

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event
from rpft.engine.trace import TASK
from rpft.engine.tracer import Tracer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 4)], [(5, 5), (3, 4), (0, 2)], 2, "stage")
NUM_BYTES = 64 << 20


def cuda_worker(index: int):
    from rpft.engine.cuda import CudaDevice

    return CudaDevice(index % torch.cuda.device_count(), None)


def slow_worker(index: int):
    from rpft.engine.cuda import CudaDevice

    return CudaDevice(index % torch.cuda.device_count(), None, emulate_link_gbps=0.05)


@pytest.mark.parametrize("make_device", [cuda_worker, slow_worker])
def test_tracing_and_a_slow_link_change_no_bit(tmp_path: Path, make_device):
    tiny_checkpoint(tmp_path, "llama")
    torch.use_deterministic_algorithms(True)
    plain = run_engine(tmp_path, PLAN, 2, steps=2, make_device=cuda_worker)
    tracers = []

    def trace_it(engine, optimizer):
        streams = [stream for worker in engine._workers for stream in worker.streams]
        tracers.append(Tracer([*streams, optimizer.stream]))
        tracers[0].start()

    traced = run_engine(tmp_path, PLAN, 2, steps=2, make_device=make_device, before_run=trace_it)
    torch.use_deterministic_algorithms(False)
    assert plain.differences(traced) == []
    trace = tracers[0].stop()
    for row in trace.rows:
        tasks = [s for s in trace.spans if (s.worker, s.stream) == row and s.nature == TASK]
        assert tasks
        if torch.cuda.device_count() >= 2:  # else two workers share the rows of one GPU
            times = [t for s in tasks for t in (s.start_seconds, s.end_seconds)]
            assert times == sorted(times)
        # A task is done on the device after it was issued; 1 ms is more than the clocks are apart.
        assert all(s.end_seconds > s.issued_seconds - 1e-3 for s in tasks)


def test_an_emulated_link_shares_its_rate_among_streams_of_one_direction_only():
    from rpft.engine.cuda import CudaDevice

    device = CudaDevice(0, None, emulate_link_gbps=2.0)
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
    uses = {use.stream: use for use in trace.streams()}
    for use in uses.values():
        assert use.copied_bytes / use.transfer_seconds / 1e9 == pytest.approx(2.0, rel=0.1)
    up = [s for s in trace.spans if s.stream != "gradients down" and s.nature == TASK]
    lasted = max(s.end_seconds for s in up) - min(s.start_seconds for s in up)
    assert lasted == pytest.approx(8 * NUM_BYTES / 2e9, rel=0.1)
    down = [s for s in trace.spans if s.stream == "gradients down" and s.nature == TASK]
    assert max(s.end_seconds for s in down) - min(s.start_seconds for s in down) < 0.7 * lasted
