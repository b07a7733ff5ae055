"""The optimizer's update and copies at the same time: what is measured of them; and nothing is left behind."""

import threading

import pytest

from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import EngineError
from rpft.optim.one_pass import FusedPass
from rpft.train.beside import measure_beside, measured_rate

SMALL = {"num_parameters": 1 << 16, "copy_bytes": 1 << 16}


@pytest.mark.parametrize("workers", [1, 3])
def test_updates_and_copies_both_go_on_beside_one_another_and_end(workers):
    before, devices = threading.active_count(), [CpuDevice(i) for i in range(workers)]
    alone, beside = measure_beside(devices, FusedPass(), **SMALL)
    assert [device.peak_bytes() for device in devices] == [0] * workers
    assert alone > 0
    assert beside.updates > 0
    assert beside.copied > 0
    assert beside.copied_alone > 0
    assert threading.active_count() == before


def test_the_rate_alone_is_measured_without_a_device_and_leaves_no_thread():
    before, updated = threading.active_count(), []

    class Watched(FusedPass):
        def adamw_pass(self, gradients, *rest, **numbers):
            updated.append(len(gradients[0]))
            super().adamw_pass(gradients, *rest, **numbers)

    assert measured_rate(Watched(), num_parameters=1 << 16) > 0
    assert set(updated) == {1 << 16}
    assert len(updated) > 5  # the median of several runs, and one before them
    assert threading.active_count() == before


def test_all_workers_copy_both_ways_at_once():
    seen = set()

    class Watched(CpuDevice):
        def stream(self, purpose, failure, delays):
            seen.add((self.name, purpose.split()[-1]))
            return super().stream(purpose, failure, delays)

    measure_beside([Watched(0), Watched(1)], FusedPass(), **SMALL)
    assert seen == {(f"cpu:{i}", way) for i in range(2) for way in ("up", "down")}


def test_a_copy_that_fails_ends_the_measurement_with_its_error():
    class Broken(CpuDevice):
        def allocate_host(self, num_bytes):
            return super().allocate_host(num_bytes + 1)  # no copy fits

    before = threading.active_count()
    with pytest.raises(EngineError, match="a copy beside the update failed"):
        measure_beside([CpuDevice(0), Broken(1)], FusedPass(), **SMALL)
    assert threading.active_count() == before
