"""An engine that stands still is ended, with a report of who waits for whom; one that works is left alone."""

import threading
import time
from types import SimpleNamespace

import pytest
from support.engines import plan_of, run_engine

from rpft.engine import watchdog
from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.watchdog import Stalled, Watchdog

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")


@pytest.fixture
def streams():
    """A failure, and two streams on it that end with the test."""
    failure = Failure()
    made = [Stream(name, failure, Delays(None)) for name in ("first", "second")]
    yield failure, made
    failure.set(RuntimeError("the test is over"))
    for stream in made:
        stream.close()
        assert stream.join(5.0)


def test_the_report_names_what_is_at_work_and_what_waits_for_it(streams):
    failure, (first, second) = streams
    over, event = threading.Event(), Event()
    first.run(lambda: over.wait(60), "slot 3 microbatch 1")
    first.record(event)
    second.wait(event)
    second.run(lambda: None, "slot 4")
    dog = Watchdog([first, second], 0.2, failure)
    with dog.expecting("step 7"):
        while not failure.failed:
            threading.Event().wait(0.02)
    over.set()
    dog.close()
    assert isinstance(failure.error, Stalled)
    said = str(failure.error)
    assert "0.2 seconds (engine.stall_seconds) in step 7" in said
    assert "At work: first: slot 3 microbatch 1 (at " in said
    assert "threading.py:" in said
    assert "Waiting: second: a wait" in said


def test_standing_still_while_nobody_waits_is_no_fault(streams):
    failure, both = streams
    dog = Watchdog(both, 0.02, failure)
    threading.Event().wait(0.2)
    dog.close()
    assert not failure.failed


def test_other_progress_keeps_it_quiet(streams):
    failure, both = streams
    counter = iter(range(1 << 40))
    dog = Watchdog(both, 0.05, failure, lambda: next(counter))
    with dog.expecting("a save"):
        threading.Event().wait(0.5)
    dog.close()
    assert not failure.failed


def test_a_process_that_was_stopped_as_a_whole_has_not_stood_still(streams, monkeypatch):
    failure, both = streams
    looks = []

    def monotonic():
        looks.append(None)
        return time.monotonic() + (1000.0 if len(looks) > 3 else 0.0)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic))
    # Far fewer looks than make a second, and from then on there is progress.
    dog = Watchdog(both, 1.0, failure, lambda: max(0, len(looks) - 7))
    with dog.expecting("step 7"):
        while len(looks) < 9:
            threading.Event().wait(0.01)
    dog.close()
    assert not failure.failed


def test_a_lost_event_in_a_real_run_ends_every_thread_with_a_report(checkpoint):
    """The optimizer never says that it has read a gradient, so the next download into it never starts."""

    watching = []

    def sabotage(engine, optimizer):
        dog = Watchdog([*engine.streams, optimizer.stream], 1.0, optimizer._failure)
        apply = optimizer._apply

        def forgetful(update):
            update.ticket.read[2] = Event()
            return apply(update)

        optimizer._apply = forgetful
        watching.append(dog.expecting("the run"))
        watching[0].__enter__()

    # Not seen, the second step's gradients would wait for ever.
    with pytest.raises(Stalled) as caught:
        run_engine(checkpoint("llama"), PLAN, 2, before_run=sabotage)
    assert "gradients down: a wait" in str(caught.value)
    assert "optimizer: the update of step" in str(caught.value)
