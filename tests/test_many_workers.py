"""``benchmarks/many_workers.py``: the engine on devices whose work only takes time."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fixtures import one_thread_a_kernel  # noqa: F401  # the benchmark sets it for its process

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder's scripts can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_queue_does_one_thing_after_another_from_when_it_is_given_it():
    from paused_device import PausedQueue

    now = [10.0]
    first, second = PausedQueue(lambda: now[0]), PausedQueue(lambda: now[0])
    first.occupy(2)
    first.occupy(1)
    assert first.end == 13
    mark = first.record_event()
    second.wait_event(mark)
    second.occupy(4)
    assert second.end == 17
    now[0] = 20.0
    assert first.end == 20, "idle"
    first.occupy(1)
    assert (first.end, mark.at) == (21, 13)


def test_a_transfer_takes_its_bytes_over_the_rate():
    from paused_device import PausedQueue, PausedStream

    failure, queue = Failure(), PausedQueue(lambda: 0.0)
    stream = PausedStream("paused:0 weights up", failure, Delays(None), queue, link=100.0)
    done = Event()
    stream.run(lambda: None, "a copy", copied_bytes=250)
    stream.run(lambda: None, "no copy")
    stream.record(done)
    done.synchronize(failure)
    stream.close()
    assert stream.join(5.0)
    assert done.native.at == 2.5


def test_layers_take_what_they_are_said_to_take():
    import torch
    from paused_device import Lengths, PausedDevice, PausedFunctions

    from rpft.model.device_batch import DeviceBatch

    device = PausedDevice(0, link=1.0)
    device.compute._now = lambda: 0.0
    functions = PausedFunctions(device, 4, 8, torch.float32, Lengths(forward=1.0, head=7.0))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    batch = DeviceBatch(ids, None, ids[0], ids[0])

    def took(work):
        begun = device.compute.end
        return work(), device.compute.end - begun

    assert took(lambda: functions.forward(0, None, {}, batch, None))[1] == 0
    hidden, seconds = took(lambda: functions.forward(1, None, {}, batch, None))
    assert (hidden.shape, seconds) == ((1, 3, 8), 1)
    given = hidden, {}, batch, None, frozenset(), True
    for with_output, early in ((True, 1), (False, 0)):
        (output, kept), seconds = took(lambda w=with_output: functions.keep(1, *given, w))
        assert ((output is not None), seconds) == (with_output, early)
        assert took(lambda kept=kept: kept.backward(hidden, {}))[1] == 3 - early
    assert took(lambda: functions.head.loss_and_gradients(hidden, {}, batch, {}, None))[1] == 7


def test_a_record_has_every_case_beside_its_prediction(monkeypatch, tmp_path, capsys):
    import many_workers

    file = tmp_path / "many_workers.json"
    # A full round of the garbage collector over all that a session has imported takes longer than a tiny run.
    monkeypatch.setattr("rpft.engine.engine.gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    words = "--forward 0.2 --workers 1,2 --extra 0 --update delayed --steps 1 --operations 2"
    monkeypatch.setattr(sys, "argv", ["many_workers.py", *words.split(), "--json", str(file)])
    assert many_workers.main() == 0
    results = json.loads(file.read_text())["results"]
    values = {(result["case"], result["metric"]): result["value"] for result in results}
    cases = list(dict.fromkeys(result["case"] for result in results))
    assert [case.partition(",")[0] for case in cases] == ["1 worker(s)", "2 worker(s)"]
    # A microbatch a worker takes 0.6 ms in each of 32 blocks, if all are fused with the head, and there 1.4 ms.
    for case in cases:
        assert values[case, "seconds a step, predicted"] >= 0.0206
        assert values[case, "workers that would do as much if never idle"] > 0
        assert values[case, "processor time a step, compute"] > 0
        assert 0 <= values[case, "workers idle, measured"] < 100
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(cases)
