"""A stream that issues to a device's queue: it goes on while the device works, a few tasks and no more."""

from __future__ import annotations

import threading

import pytest

from rpft.engine.failure import Failure
from rpft.engine.queue_stream import QueueStream
from rpft.engine.streams import Delays, Event
from rpft.engine.tracer import HostClock

TASKS = 20
IN_FLIGHT = 6


class Gate:
    """A mark that the device reaches when it is opened."""

    def __init__(self) -> None:
        self.opened, self.waited_for = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.opened.wait(30)

    def query(self) -> bool:
        return self.opened.is_set()


class Held:
    """A queue that gets nowhere by itself."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.told_to_wait_for: list[object] = []

    def record_event(self) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]

    def gate(self, number: int) -> Gate:
        """That of task ``number``, as soon as there is one."""
        pause = threading.Event()
        while len(self.gates) <= number:
            pause.wait(0.001)
        return self.gates[number]

    def wait_event(self, event: object) -> None:
        self.told_to_wait_for.append(event)


@pytest.fixture
def held():
    queue, failure = Held(), Failure()
    stream = QueueStream("cuda:0 compute", failure, Delays(None), queue, HostClock())
    yield stream, queue, failure
    failure.set(RuntimeError("the test is over"))
    for gate in queue.gates:
        gate.opened.set()
    stream.close()
    assert stream.join(5.0)


def test_few_tasks_are_issued_ahead_of_the_device(held):
    stream, queue, failure = held
    issued, done = [], Event()
    for number in range(TASKS):
        stream.run(lambda number=number: issued.append(number), "a task")
    stream.record(done)
    for number in range(TASKS - IN_FLIGHT):
        assert queue.gate(number).waited_for.wait(30)
        assert issued == list(range(number + IN_FLIGHT + 1))
        assert not done.wait(0.0)
        queue.gate(number).opened.set()
    done.wait_issued(failure)
    assert issued == list(range(TASKS))
    assert done.native is queue.gates[-1], "complete when the device is there"


def test_an_event_is_complete_when_the_device_is_there_and_not_when_it_is_issued(held):
    stream, queue, failure = held
    done = Event()
    assert not done.complete
    stream.record(done)
    done.wait_issued(failure)
    assert not done.complete
    queue.gates[-1].opened.set()
    assert done.complete


def test_the_device_waits_for_another_queue_and_the_thread_only_until_it_is_known_what_for(held):
    stream, queue, failure = held
    event, mark, done = Event(), Gate(), Event()
    stream.wait(event)
    stream.record(done)
    assert not done.wait(0.01)
    event.set(mark)
    done.wait_issued(failure)
    assert queue.told_to_wait_for == [mark]


def test_neither_the_device_nor_the_thread_waits_for_a_queue_that_is_there_already(held):
    """Calls that wait give the interpreter away, and who has it next may keep it for long."""
    stream, queue, failure = held
    there, done = Gate(), Event()
    there.opened.set()
    event = Event()
    event.set(there)
    stream.wait(event)
    stream.wait_on_host(event)
    stream.record(done)
    done.wait_issued(failure)
    assert queue.told_to_wait_for == []
    assert not there.waited_for.is_set()


def test_one_mark_does_for_all_that_stands_behind_a_task_and_a_wait_asks_for_another(held):
    stream, queue, failure = held
    first, second, third = Event(), Event(), Event()
    stream.run(lambda: None, "a task")
    stream.record(first)
    stream.record(second)
    event = Event()
    event.set(Gate())
    stream.wait(event)
    stream.record(third)
    third.wait_issued(failure)
    assert first.native is second.native is queue.gates[0]
    assert third.native is queue.gates[1]


def test_what_has_happened_on_the_host_is_nothing_to_wait_for_on_the_device(held):
    stream, queue, failure = held
    event, done = Event(), Event()
    event.set()
    stream.wait(event)
    stream.record(done)
    done.wait_issued(failure)
    assert queue.told_to_wait_for == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_ends_when_the_device_is_done_with_the_memory_that_it_was_given(fails, held):
    stream, queue, failure = held
    elsewhere = Event()
    elsewhere.set(Gate())
    stream.run(lambda: None, "a copy to memory of the host")
    stream.wait(elsewhere)
    stream.record(Event())  # behind the copy, and no mark to wait for at the end
    gate = queue.gate(1)
    if fails:
        failure.set(RuntimeError("another thread's"))
    stream.close()
    assert queue.gates[0].waited_for.wait(30)
    assert not stream.join(0.01)
    assert not gate.waited_for.is_set()
    queue.gates[0].opened.set()
    assert stream.join(30)


def test_a_device_that_breaks_at_the_end_is_told_of(held):
    stream, queue, failure = held

    class Broken(Gate):
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    queue.record_event = Broken
    stream.run(lambda: None, "a copy")
    stream.close()
    assert stream.join(30)
    assert "illegal memory access" in str(failure.error)
