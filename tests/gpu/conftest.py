"""What the GPU tests share: checkpoints, deterministic kernels, graphs that are made once, and late streams."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import engines
from support.fixtures import SharedFunctions, checkpoint, one_thread_a_kernel

from rpft.engine.cuda import CudaDevice, CudaStream
from rpft.engine.device import Device
from rpft.engine.failure import Failure
from rpft.engine.streams import Delays, Event, Stream

__all__ = ["checkpoint", "one_thread_a_kernel"]

MakeDevice = Callable[[int], Device]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.fixture(autouse=True)
def nothing_left_on_a_device() -> Iterator[None]:
    """Tests have caps far below what cycles of an earlier one, and workspaces of its streams, may still hold."""
    yield
    gc.collect()
    for index in range(torch.cuda.device_count()):
        CudaDevice(index, None).reclaim()


_SHARED = SharedFunctions(deterministic=True)


@pytest.fixture(autouse=True)
def functions_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LayerFunctions", _SHARED)


@pytest.fixture
def make_device() -> MakeDevice:
    """Makes worker ``index``; on a machine with fewer GPUs several share one, which the protocol allows."""
    return lambda index: CudaDevice(index % torch.cuda.device_count(), None)


@pytest.fixture
def make_late() -> Callable[..., MakeDevice]:
    """make_late(purpose, seed, ...) -> what makes workers whose stream of that purpose is late: ``LateDevice``."""

    def make(purpose: str, seed: int, **how: Any) -> MakeDevice:
        return lambda index: LateDevice(index % torch.cuda.device_count(), purpose, seed, **how)

    return make


class LateDevice(CudaDevice):
    """One of its streams has a kernel that only spins queued before every task, for cycles drawn from ``seed``.

    2 to 4 million cycles are 1 to 2 ms. Without ``in_order`` no stream waits on the device for another.
    """

    def __init__(
        self,
        index: int,
        purpose: str,
        seed: int,
        cycles: tuple[int, int] = (2_000_000, 4_000_000),
        in_order: bool = True,
    ) -> None:
        super().__init__(index, None)
        self._late, self._seed, self._cycles, self._in_order = purpose, seed, cycles, in_order

    def stream(self, purpose: str, failure: Failure, delays: Delays) -> Stream:
        rng = random.Random(f"{self._seed} {self.name} {purpose}")
        late, cycles = purpose == self._late, self._cycles

        class LateStream(CudaStream):
            in_order = self._in_order

            def _carry_out(self, task: Callable[[], object], what: str, copied_bytes: int) -> None:
                if late:
                    torch.cuda._sleep(rng.randint(*cycles))  # on the thread's current stream, ``native``
                super()._carry_out(task, what, copied_bytes)

            def _await(self, event: Event) -> None:
                if self.in_order:
                    super()._await(event)
                else:
                    event.wait_issued(self._failure)

        return LateStream(f"{self.name} {purpose}", failure, delays, self.torch_device, self._clock, None)
