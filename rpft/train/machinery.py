"""Engine, optimizer and watchdog of a run, and how they begin anew: with a smaller plan, or further back.

When a device's memory does not do, the step at work is undone and nothing else. Its slots have written nothing
but gradients, which the next attempt writes again. An update that has begun is finished: it needs no worker any
more. So every layer stands at the same step, and the run goes on behind it.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Sequence

import torch

from rpft.engine.controller import Ticket
from rpft.engine.engine import Engine
from rpft.engine.failure import POLL_SECONDS, EngineError, Failure, causes, out_of_device_memory
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.watchdog import Watchdog
from rpft.model.host_store import HostStore
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.train.checkpoint import TrainState
from rpft.train.prepare import Prepared
from rpft.train.saver import Saver
from rpft.train.smaller import smaller

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0

_TURNS_LEFT = 3
"""Slots of a step for each worker: where a step ends, the workers are at one each of those of the next."""


class Machinery:
    """What carries out the steps of a run. All methods are called from the main thread."""

    def __init__(
        self, prepared: Prepared, store: HostStore, saver: Saver, failure: Failure, state: TrainState
    ) -> None:
        """``state``: where the run stands. To be followed by ``start``, or by ``start_smaller`` if that fails."""
        self.prepared, self._store, self.saver, self._failure = prepared, store, saver, failure
        self._delays = Delays(prepared.recipe.engine.inject_delays)
        self._engine: Engine | None = None
        self._begin_at(state)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def steps_ahead(self) -> int:
        """Steps that are best submitted, and not over, whenever one is waited for.

        The first slots of a step wait for an exact update of the step before, for a late one of the step before
        that. By then workers that have few slots of a step each have taken up those of the next step, too.
        """
        prepared = self.prepared
        slots = prepared.plan.num_slots * prepared.rounds
        return 2 if prepared.delayed and slots < _TURNS_LEFT * len(prepared.devices) else 1

    def streams(self) -> list[Stream]:
        """Those of the engine and of the optimizer; none while there is no engine. Any thread's."""
        engine = self._engine
        return [] if engine is None else [*engine.streams, *self.optimizer.streams]

    def _begin_at(self, state: TrainState) -> None:
        recipe = self.prepared.recipe
        train, settings, adapter = recipe.train, recipe.optimizer, recipe.adapter
        schedule = Schedule(
            train.lr_scheduler,
            train.learning_rate,
            self.prepared.data.order.num_steps,
            train.warmup_ratio,
            train.min_lr_ratio,
            train.decay_ratio,
        )
        self.optimizer = HostOptimizer(
            self._store,
            AdamW(
                settings.betas,
                settings.eps,
                settings.weight_decay,
                fast_ratio=1.0 if adapter is None else adapter.lr_ratio_b,
                seed=train.seed,
            ),
            schedule,
            train.max_grad_norm,
            self._failure,
            self._delays,
            updates_applied=state.updates_applied,
            skipped_steps=state.skipped_steps,
            skipped_in_a_row=state.skipped_in_a_row,
            kernels=self.prepared.one_pass,
            before_update=self.saver.before_update,
            do_ahead=self.saver.copy_ahead,
            last_step=state.step,
        )

    def start(self) -> None:
        """Builds the engine; torch.OutOfMemoryError where a device has not the memory for its buffers."""
        prepared, delayed = self.prepared, self.prepared.delayed
        self._last: Ticket | None = None
        """Of the step that the engine was given last."""
        self._engine = Engine(
            prepared.skeleton,
            self._store,
            prepared.plan,
            prepared.devices,
            functions=prepared.functions,
            max_tokens=prepared.max_tokens,
            seed=prepared.recipe.train.seed,
            update_lag=1 if delayed else 0,
            send_update=self.optimizer.submit,
            failure=self._failure,
            delays=self._delays,
            # Only the very first step reads the latest weights, since there are no others.
            lagging=delayed and self.optimizer.last_step > 0,
        )
        self.watchdog = Watchdog(
            self.streams(),
            prepared.recipe.engine.stall_seconds,
            self._failure,
            lambda: self.saver.progress_bytes,
        )

    def submit_step(self, step: int, microbatches: Sequence[HostBatch]) -> None:
        """Gives the engine a step; before an exact one it waits until the step before is at its first loss.

        Right behind an update the threads that issue short layers want the interpreter, and queueing a step has it
        for long. Nothing of an exact step can be computed before the update of the step before.
        """
        if self._last is not None and not self.prepared.delayed:
            with self.watchdog.expecting(f"step {self._last.step}"):
                self._wait_issued(self._last.losses.ready[0])
        self._last = self.engine.submit_step(step, microbatches)

    def _wait_issued(self, event: Event) -> None:
        while not event.wait(POLL_SECONDS):
            self._failure.raise_if_failed()

    def rest(self) -> None:
        """Waits until every submitted step is applied; what comes reads the latest weights."""
        self.engine.flush()
        done = self.optimizer.stream.record(Event())
        with self.watchdog.expecting("the last update"):
            self._wait_issued(done)

    def start_smaller(self, error: BaseException) -> None:
        """Begins anew, behind the last update, with the next smaller plan, after a device had too little memory.

        Raises EngineError where no plan is smaller, or ``error``, which said so, where more than that went wrong.
        """
        if self._failure.lost:
            raise error
        ended = self._end()
        if not ended or self._failure.lost:
            raise error
        self._let_go(error)
        self._failure.clear()
        self.optimizer.restart()
        while (found := smaller(self.prepared)) is not None:
            self.prepared = found
            self.saver.limit_memory(found.copies_bytes)
            try:
                self.start()
                return
            except torch.OutOfMemoryError as again:
                self._let_go(again)
        raise EngineError(
            f"{error}. Every smaller plan was tried. Less memory is needed with a smaller data.max_seq_len, with"
            " an adapter, or when nothing else uses the device"
        ) from error

    def change_plan(self, prepared: Prepared) -> None:
        """Goes on with another plan, behind the last update. Nothing may be under way.

        Raises EngineError where a thread of the old plan does not end.
        """
        if not self._end():
            self._failure.raise_if_failed()
            raise EngineError("a thread of the engine did not end before the change to another plan")
        self._let_go()
        self.prepared = prepared
        self.saver.limit_memory(prepared.copies_bytes)
        self.optimizer.restart()
        self.start()

    def go_back(self, read: Callable[[], TrainState], reason: Exception) -> TrainState:
        """Drops what is under way and has ``read`` fill the store; ``start`` goes on behind what that gives.

        A device without memory is no hindrance; another fault, that came before or while all ended, is raised.
        """
        self._failure.set(reason)
        ended = self._end()
        self.saver.wait()
        for error in self._failure.errors:
            if error is not reason and not out_of_device_memory(error):
                raise error
        if not ended:
            raise reason
        self._let_go()
        state = read()
        self._failure.clear()
        self._begin_at(state)
        return state

    def _end(self) -> bool:
        """Ends all threads, the optimizer's when it has finished what it has begun; whether they did end."""
        patience_seconds = self.prepared.recipe.engine.stall_seconds  # a layer may be compiled, a model updated
        left = [] if self._engine is None else self._engine.close(patience_seconds)
        self.optimizer.close()
        ended = self.optimizer.join(patience_seconds)
        if self._engine is not None:
            self.watchdog.close()
        return ended and not left

    def _let_go(self, error: BaseException | None = None) -> None:
        """Frees the memory of the engine, some of which tracebacks of ``error`` and of threads' errors hold."""
        for cause in (cause for each in (error, *self._failure.errors) for cause in causes(each)):
            for each in (cause, cause.__context__):
                if each is not None:
                    logger.debug("%s", "".join(traceback.format_exception(each)))
                    # Frames that are cleared still hold the closures of their functions.
                    each.__traceback__ = None
        self._engine = None
        gc.collect()
        for device in self.prepared.devices:
            device.reclaim()

    def close(self, at_once: bool = False) -> None:
        """Ends all threads. A checkpoint that is being written is finished, since no update can reach it now."""
        if self._engine is not None:
            self._engine.close()
        self.optimizer.close()
        self.optimizer.join(_CLOSE_SECONDS)
        if at_once:
            self.saver.give_up()
        self.saver.wait()
        self.saver.close()
        if self._engine is not None:
            self.watchdog.close()
