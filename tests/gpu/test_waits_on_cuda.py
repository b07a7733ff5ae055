"""Every wait between CUDA streams is there: whichever stream of a worker is late on the device, no bit changes."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.engine.failure import EngineError, Failure
from rpft.engine.streams import Delays, Event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STREAMS = ["compute", "weights up", "activations up", "activations down", "gradients down"]
FORWARD, BACKWARD = [(0, 1), (2, 4)], [(5, 5), (3, 4), (1, 2), (0, 0)]
WORKERS = 2
RUNS = {
    # Two rounds: the first one's sums go up again, and two float32 accumulators take turns.
    "sums over rounds": (
        plan_of(FORWARD, BACKWARD, 2, "stage"),
        {"dtype": torch.float32, "kernels": "trace"},
    ),
    # One round: sums leave rounded, from a buffer of their own.
    "rounded, delayed update": (
        plan_of(FORWARD, BACKWARD, 4, "layer"),
        {"dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16, "update_lag": 1, "kernels": "trace"},
    ),
}


@pytest.fixture(scope="module")
def punctual(checkpoint):
    """punctual(name, make_device) -> the outcome of RUNS[name] with no stream late."""
    known = {}

    def of(name, make_device):
        if name not in known:
            known[name] = run(name, checkpoint, make_device)
            assert not any(result.skipped for result in known[name].results)
        return known[name]

    return of


def run(name, checkpoint, make_device):
    plan, settings = RUNS[name]
    engines = []  # kept, so that no buffer is given back while late work is still to be done on the device
    outcome = run_engine(
        checkpoint("qwen3"),
        plan,
        WORKERS,
        make_device=make_device,
        before_run=lambda engine, optimizer: engines.append(engine),
        **settings,
    )
    for device in engines[0].devices:
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)
    return outcome


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_that_is_late_on_the_device_changes_no_bit(stream, checkpoint, make_device, make_late, punctual):
    for seed, name in enumerate(RUNS):
        late = run(name, checkpoint, make_late(stream, seed))
        assert punctual(name, make_device).differences(late) == [], name


@pytest.mark.parametrize("stream", STREAMS)
def test_without_waits_on_the_device_a_late_stream_does_change_them(
    stream, checkpoint, make_device, make_late, punctual
):
    """Else the test above would prove nothing."""
    name = "rounded, delayed update"
    # Harm is done by what is issued meanwhile: on a slow host 10 ms must do for the work of a layer, and 50 for
    # the next slot's, which harms gradients that go down late.
    cycles = (100_000_000, 150_000_000) if stream == "gradients down" else (20_000_000, 30_000_000)
    try:
        late = run(name, checkpoint, make_late(stream, 0, in_order=False, cycles=cycles))
    except EngineError as error:
        if not isinstance(error.__cause__, ValueError):  # a sum of squares read too early
            raise
    else:
        assert punctual(name, make_device).differences(late) != []


def test_a_stream_starts_behind_what_was_done_to_its_buffers(make_device):
    """Deterministic torch fills what it allocates, where nothing else orders that before an upload."""
    device, failure = make_device(0), Failure()
    torch.cuda._sleep(200_000_000)  # 0.1 s
    buffer = device.allocate(1 << 20).fill_(1)
    stream = device.stream("weights up", failure, Delays(None))
    stream.run(buffer.zero_, "first use")
    stream.record(Event()).synchronize(failure)
    stream.close()
    assert stream.join(5.0)
    torch.cuda.synchronize()
    assert not buffer.any()


def test_a_stream_that_a_fault_ends_has_no_copy_under_way(make_device):
    device, failure = make_device(0), Failure()
    buffer, host = device.allocate(1 << 20).fill_(1), device.allocate_host(1 << 20)
    stream, issued = device.stream("gradients down", failure, Delays(None)), Event()

    def copy():
        torch.cuda._sleep(200_000_000)  # 0.1 s
        host.copy_(buffer, non_blocking=True)

    stream.run(copy, "a copy")
    stream.record(issued)
    issued.wait_issued(failure)
    failure.set(RuntimeError("another thread's"))
    assert stream.join(5.0)
    assert host.all()
