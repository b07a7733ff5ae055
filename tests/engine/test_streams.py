"""Streams run their tasks in order, events order them across, delays replay from a seed, rings take turns."""

import subprocess
import threading
import weakref

import pytest
import torch

from rpft.engine.buffers import BoundaryPool, Ring
from rpft.engine.failure import Cancelled, EngineError, Failure
from rpft.engine.streams import Delays, Event, Stream, happened


@pytest.fixture
def pair():
    """Two streams and their failure, closed afterwards."""
    failure = Failure()
    streams = [Stream(name, failure, Delays(None)) for name in ("a", "b")]
    yield *streams, failure
    for stream in streams:
        stream.close()
        assert stream.join(5.0)


def test_what_stands_behind_a_wait_runs_after_what_stands_before_the_mark(pair):
    a, b, failure = pair
    seen, gate = [], threading.Event()
    a.run(lambda: gate.wait(5.0) and None, "gate")
    a.run(lambda: seen.append("a"), "first")
    b.wait(a.record(Event()))
    b.run(lambda: seen.append("b"), "second")
    done = b.record(Event())
    assert not done.wait(0.05)
    assert seen == []
    gate.set()
    done.synchronize(failure)
    assert seen == ["a", "b"]


def test_a_child_process_of_a_stream_outlives_an_interrupt_meant_for_the_main_thread(pair):
    """A terminal sends Ctrl-C to every process of the group: to the compilers that a stream has started, too."""
    a, _, failure = pair
    said = []
    command = ["sh", "-c", "kill -INT $$; echo alive"]
    a.run(lambda: said.append(subprocess.run(command, capture_output=True, text=True).stdout), "a child")
    a.record(Event()).synchronize(failure)
    assert said == ["alive\n"]


def test_tasks_queued_before_close_are_done(pair):
    a, _, _ = pair
    seen = []
    for number in range(50):
        a.run(lambda number=number: seen.append(number), "task")
    a.close()
    assert a.join(5.0)
    assert seen == list(range(50))


def test_the_first_fault_is_kept_and_cancels_who_waits(pair):
    a, b, failure = pair

    def fail():
        raise ValueError("wrong")

    b.wait(Event())  # never happens
    a.run(fail, "slot 3 microbatch 1")
    assert a.join(5.0)
    assert b.join(5.0)
    with pytest.raises(EngineError, match="a: slot 3 microbatch 1 failed: ValueError: wrong"):
        failure.raise_if_failed()
    failure.set(RuntimeError("later"))
    assert isinstance(failure.error, EngineError)
    with pytest.raises(Cancelled):
        failure.cancel_if_failed()


def test_what_is_queued_after_a_fault_is_let_go_of_with_the_stream():
    """It holds the buffers of the engine that failed, while the next one takes its own."""
    failure = Failure()
    stream = Stream("a", failure, Delays(None))
    stream.run(lambda: 1 / 0, "a fault")
    stream._thread.join(5.0)
    buffer = torch.empty(1)
    held = weakref.ref(buffer)
    stream.run(lambda buffer=buffer: buffer, "what comes too late")
    del buffer
    stream.close()
    assert stream.join(5.0)
    assert held() is None


def test_delays_replay_from_their_seed_and_differ_between_threads_and_seeds(monkeypatch):
    def pauses(seed, thread):
        slept = []
        monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: slept.append(seconds))
        pause = Delays(seed).of(thread)
        for _ in range(40):
            pause()
        monkeypatch.undo()
        return slept

    assert pauses(1, "cpu:0 compute") == pauses(1, "cpu:0 compute")
    assert pauses(1, "cpu:0 compute") != pauses(1, "cpu:1 compute")
    assert pauses(1, "cpu:0 compute") != pauses(2, "cpu:0 compute")
    assert len(pauses(1, "cpu:0 compute")) > 5
    assert pauses(None, "cpu:0 compute") == []


def test_a_ring_hands_out_buffers_in_turn_each_free_when_its_last_user_says_so():
    buffers = [torch.zeros(1), torch.zeros(1)]
    ring = Ring(buffers)
    first, free, freed = ring.next()
    assert first is buffers[0]
    assert free.wait(0.0)
    second, _, _ = ring.next()
    assert second is buffers[1]
    again, free, _ = ring.next()
    assert again is buffers[0]
    assert free is freed
    assert not free.wait(0.0)


def test_a_boundarys_memory_is_used_again_only_behind_its_last_readers():
    pool = BoundaryPool(lambda n: torch.zeros(n, dtype=torch.uint8), 4 * 24, torch.float32)
    boundary = pool.acquire((2, 3, 4), num_readers=2)
    readings = [pool.read(boundary, at=0)]
    other = pool.acquire((1, 3, 4), num_readers=1)  # the first still has a reader to come
    assert pool.num_buffers == 2
    assert other.hidden.shape == (1, 3, 4)
    readings.append(pool.read(boundary, at=0))
    reused = pool.acquire((2, 3, 4), num_readers=1)
    assert pool.num_buffers == 2
    assert reused.memory is boundary.memory
    assert reused.writable_after == [reading.done for reading in readings]
    assert other.writable_after == []


def test_an_event_that_has_happened_never_blocks():
    happened().synchronize(Failure())
