"""The engine put together: workers on a pool of devices, a controller in front of them, one failure for all."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence

import torch

from rpft.engine.buffers import BoundaryPool
from rpft.engine.controller import Controller, Ticket, Update
from rpft.engine.device import Device
from rpft.engine.failure import POLL_SECONDS, Failure
from rpft.engine.losses import Losses
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays, Stream
from rpft.engine.worker import Worker
from rpft.model.functions import LayerFunctions
from rpft.model.host_store import HostStore
from rpft.model.layout import first_trained
from rpft.model.skeleton import Skeleton, has_dropout
from rpft.plan.plan import Plan
from rpft.plan.sizes import worker_sizes

_CLOSE_SECONDS = 5.0
"""All threads end within this after a fault or a close."""

_SWITCH_SECONDS = 5e-4
"""A thread that computes in Python, the optimizer's say, gives way after this: a worker's threads issue its layers
meanwhile, a millisecond or two each, and Python's own 5 ms would let the device run dry."""


class Engine:
    """Runs steps and evaluations of one model over a plan. Methods are called from one thread."""

    def __init__(
        self,
        skeleton: Skeleton,
        store: HostStore,
        plan: Plan,
        devices: Sequence[Device],
        *,
        functions: Sequence[LayerFunctions],
        max_tokens: int,
        seed: int,
        update_lag: int,
        send_update: Callable[[Update], None],
        failure: Failure,
        delays: Delays,
        lagging: bool = False,
    ) -> None:
        """``functions``: what runs the layers on each device. ``max_tokens``: rows x sequence of the largest
        microbatch. ``update_lag``: 0 sync, 1 delayed updates. ``lagging``: see ``Controller``.

        Every buffer of fixed size is allocated here; raises UserError for a plan that does not fit the model, and
        torch.OutOfMemoryError for one that does not fit a device.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        layouts = [layer.layout for layer in store.layers]
        plan.check(len(layouts))
        self.plan, self.devices, self._failure = plan, devices, failure
        hidden_size = skeleton.model.config.get_text_config().hidden_size
        dtype = functions[0].dtype
        boundary_bytes = max_tokens * hidden_size * dtype.itemsize
        sizes = worker_sizes(layouts, plan, boundary_bytes, store.gradient_dtype, max_tokens)
        resident = {i: store.layers[i].frozen for i in plan.resident}
        self._workers: list[Worker] = []
        try:
            for device, own in zip(devices, functions, strict=True):
                own.expect(max_tokens)
                parts = own, layouts, first_trained(layouts), sizes, plan.keep_bytes_per_token, resident
                self._workers.append(Worker(device, *parts, failure, delays, store.on_disk))
        except BaseException:
            self.close()
            raise
        allocate = devices[0].allocate_host
        extra = [layout.extra_input_bytes for layout in layouts]
        pools = {each: BoundaryPool(allocate, boundary_bytes + each * max_tokens, dtype) for each in {*extra}}
        self._boundaries = [pools[each] for each in extra]
        kept = BoundaryPool(allocate, sizes.kept_bytes, torch.uint8)
        self._controller = Controller(
            plan,
            store,
            self._workers,
            self._boundaries,
            kept,
            [hidden_size + each // dtype.itemsize for each in extra],
            seed if has_dropout(skeleton.model) else None,
            update_lag,
            send_update,
            lagging,
            functions[0].balanced,
        )

    def submit_step(self, step: int, microbatches: Sequence[HostBatch]) -> Ticket:
        """Queues a step; the update follows on its own. See ``Controller``."""
        self._failure.raise_if_failed()
        return self._controller.submit_step(step, microbatches)

    @staticmethod
    def settle() -> None:
        """To be called once the first step is done: takes what exists out of the garbage collector's rounds.

        A full round over what a compiler leaves behind holds up every thread, several times a step: see
        docs/performance.md.
        """
        gc.collect()
        gc.freeze()

    def flush(self) -> None:
        """Lets what is queued from now on read the latest weights, also with delayed updates."""
        self._controller.flush()

    def evaluate(self, microbatches: Sequence[HostBatch]) -> float:
        """The loss sum over the trained tokens of ``microbatches``, dropout off; blocks until it is known."""
        losses = self._controller.submit_evaluation(microbatches)
        self.wait(losses)
        return losses.total()

    def wait(self, losses: Losses) -> None:
        """Blocks until ``losses`` are complete; raises the engine's fault, if any."""
        for event in losses.ready:
            while not event.wait(POLL_SECONDS):
                self._failure.raise_if_failed()
            event.synchronize(self._failure)

    @property
    def streams(self) -> list[Stream]:
        """The streams of all workers."""
        return [stream for worker in self._workers for stream in worker.streams]

    @property
    def boundary_buffers(self) -> int:
        """Host buffers for boundaries that the plan has turned out to need."""
        return sum(pool.num_buffers for pool in {*self._boundaries})

    def close(self, within_seconds: float = _CLOSE_SECONDS) -> list[str]:
        """Ends every thread, finishing queued work unless the engine failed; names of threads that did not end."""
        gc.unfreeze()  # what ``settle`` set aside may be garbage from now on
        streams = self.streams
        for stream in streams:
            stream.close()
        deadline = time.monotonic() + within_seconds
        return [s.name for s in streams if not s.join(max(0.0, deadline - time.monotonic()))]
