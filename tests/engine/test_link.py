"""The emulated link, on CUDA streams made of virtual time: transfers last as told, and take turns a direction."""

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rpft.engine.cuda import CudaClock, CudaStream
from rpft.engine.failure import Failure
from rpft.engine.link import EmulatedLink
from rpft.engine.streams import Delays, Event
from rpft.engine.trace import TASK
from rpft.engine.tracer import Tracer

GPU = torch.device("cuda", 0)
CYCLES_PER_SECOND = 1.7e9


class Host(threading.local):
    """Of each thread: what its virtual time is, and its current stream."""

    seconds = 0.0
    stream: Any = None


host = Host()


class VirtualStream:
    """A CUDA stream whose work takes virtual time, at once."""

    def __init__(self, device=None, priority=0):
        self.seconds = 0.0

    def wait_event(self, event):
        self.seconds = max(self.seconds, event.at)

    def record_event(self):
        event = VirtualEvent()
        event.record(self)
        return event


class VirtualEvent:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self, stream):
        self.at = stream.seconds

    def synchronize(self):
        host.seconds = max(host.seconds, self.at)

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def virtual_gpu(monkeypatch):
    """Puts virtual time in the place of torch.cuda."""
    idle = VirtualStream()

    @contextmanager
    def current(stream):
        before, host.stream = host.stream, stream
        yield
        host.stream = before

    def sleep(cycles):
        host.stream.seconds = max(host.stream.seconds, host.seconds) + cycles / CYCLES_PER_SECOND

    for name, value in {
        "Stream": VirtualStream,
        "Event": VirtualEvent,
        "stream": current,
        "current_stream": lambda device: idle,
        "set_device": lambda device: None,
        "synchronize": lambda device: None,
        "_sleep": sleep,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def transfers(copies, gigabytes_per_second, ways=("up", "up")):
    """Spans of ``copies``: (stream number, bytes, seconds that the copy really takes), issued one by one."""
    failure, clock = Failure(), CudaClock(GPU)
    links = {} if gigabytes_per_second is None else {w: EmulatedLink(GPU, gigabytes_per_second) for w in ways}
    streams = [
        CudaStream(f"cuda:0 stream{i} {way}", failure, Delays(None), GPU, clock, links.get(way))
        for i, way in enumerate(ways)
    ]
    for link in links.values():
        link._stream.seconds = 0.0  # type: ignore[attr-defined]  # as if it had been measured long ago
    tracer = Tracer(streams)
    tracer.start()
    for number, num_bytes, real_seconds in copies:
        native: Any = streams[number].native

        def copy(native=native, real_seconds=real_seconds):
            native.seconds += real_seconds

        streams[number].run(copy, "copy", num_bytes)
        streams[number].record(Event()).synchronize(failure)
    trace = tracer.stop()
    for stream in streams:
        stream.close()
        assert stream.join(5.0)
    first = min(s.start_seconds for s in trace.spans)
    return [
        [
            (s.start_seconds - first, s.end_seconds - first)
            for s in trace.spans
            if s.stream.startswith(f"stream{i}") and s.nature == TASK
        ]
        for i in range(len(streams))
    ]


def close_to(*times):
    return [pytest.approx(pair, abs=1e-5) for pair in times]


@pytest.mark.usefixtures("virtual_gpu")
def test_a_transfer_takes_its_bytes_over_the_rate_and_a_slower_copy_its_own_time():
    [one, _] = transfers([(0, 10 * 10**9, 0.2), (0, 10**9, 0.5), (0, 5 * 10**9, 0.1)], 10)
    assert one == close_to((0.0, 1.0), (1.0, 1.5), (1.5, 2.0))


@pytest.mark.usefixtures("virtual_gpu")
def test_streams_of_one_direction_take_turns_and_the_other_direction_is_free():
    copies = [(0, 10 * 10**9, 0.1), (1, 20 * 10**9, 0.1), (0, 10 * 10**9, 0.1)]
    one, other = transfers(copies, 10)
    assert one == close_to((0.0, 1.0), (3.0, 4.0))
    assert other == close_to((1.0, 3.0))
    one, other = transfers(copies, 10, ways=("up", "down"))
    assert one == close_to((0.0, 1.0), (1.0, 2.0))
    assert other == close_to((0.0, 2.0))


@pytest.mark.usefixtures("virtual_gpu")
def test_tasks_that_are_no_transfers_and_a_link_that_is_not_emulated_take_their_own_time():
    [one, _] = transfers([(0, 0, 0.25), (0, 10**9, 0.5), (0, 0, 0.25)], 0.5)
    assert one == close_to((0.0, 0.25), (0.25, 2.25), (2.25, 2.5))
    [one, _] = transfers([(0, 10**12, 0.25)], None)
    assert one == close_to((0.0, 0.25))


@pytest.mark.usefixtures("virtual_gpu")
def test_the_length_of_a_cycle_follows_the_clock_of_the_gpu(monkeypatch):
    link: Any = EmulatedLink(GPU, 1.0)
    stream = VirtualStream()

    def seconds():
        before = link._stream.seconds
        link.reserve(stream, 10**9)
        return link._stream.seconds - before

    assert seconds() == pytest.approx(1.0)
    sleep = torch.cuda._sleep
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: sleep(2 * cycles))  # half the rate from here on
    assert seconds() == pytest.approx(2.0)
    for _ in range(20):
        last = seconds()
    assert last == pytest.approx(1.0, abs=0.1)
