"""On a link that is slower than compute results do not pile up on a worker."""

from __future__ import annotations

import threading

import pytest
from support.engines import plan_of, run_engine

from rpft.engine import worker
from rpft.engine.compute import SlotRun
from rpft.engine.cpu import CpuDevice
from rpft.engine.streams import Stream
from rpft.plan.sizes import RESULTS_IN_FLIGHT

PLAN = plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "layer")
"""Five results for each of four microbatches leave the one forward slot."""


class SlowLinkDevice(CpuDevice):
    """Whose results go down only when compute stands still."""

    def stream(self, purpose, failure, delays):
        made = super().stream(purpose, failure, delays)
        if purpose == "compute":
            self.compute = made
        elif purpose == "activations down":
            carry_out, pause = made._carry_out, threading.Event()

            def carry_out_late(task, what, copied_bytes):
                still = 0
                while still < 3:  # seen twice more, 2 ms apart
                    still = still + 1 if self.compute.task in ("", "a wait") else 0
                    pause.wait(0.002)
                carry_out(task, what, copied_bytes)

            made._carry_out = carry_out_late
        return made


@pytest.mark.parametrize("limited", [True, False])
def test_results_wait_for_those_before_them_to_be_down(limited, checkpoint, monkeypatch):
    computed = down = most = 0
    forward, deliver = SlotRun.forward, Stream.record

    def counted_forward(run, task, layers, state):
        nonlocal computed, most
        forward(run, task, layers, state)
        computed += 1
        most = max(most, computed - down)

    def counted_record(stream, event):
        def arrived():
            nonlocal down
            down += 1

        if stream.name.endswith("activations down"):
            stream._put(arrived, (), "a count")
        return deliver(stream, event)

    monkeypatch.setattr(SlotRun, "forward", counted_forward)
    monkeypatch.setattr(Stream, "record", counted_record)
    if not limited:
        monkeypatch.setattr(worker, "RESULTS_IN_FLIGHT", 10**6)
    run_engine(checkpoint("llama"), PLAN, make_device=SlowLinkDevice, steps=1)
    assert (most <= RESULTS_IN_FLIGHT) is limited
