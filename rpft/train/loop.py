"""The training loop: one for full, LoRA, sync and delayed runs, on any pool of workers.

The loop stays one step ahead of the engine: while step t computes, step t + 1 is queued behind it, so that the
end of one step and the start of the next overlap. A checkpoint is written behind it, too. It comes to rest only
where state must stand still: at an evaluation of exact updates, at the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from rpft.data.batches import Microbatch
from rpft.engine.engine import Engine
from rpft.engine.failure import POLL_SECONDS, Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays, Event
from rpft.engine.watchdog import Watchdog
from rpft.model.adapters import initialise_lora
from rpft.model.checkpoint import load_checkpoint
from rpft.model.host_store import HostStore
from rpft.model.save import save_result
from rpft.model.verify import verify_head
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.train.checkpoint import TrainState, read_state, restore
from rpft.train.faults import keep_batches, not_finite
from rpft.train.interrupts import Interrupted, Interrupts, StoppedAtOnce
from rpft.train.metrics import EvalRecord, MetricsFile, StepRecord
from rpft.train.prepare import Prepared
from rpft.train.reporter import Reporter
from rpft.train.resume import about_run, checkpoint_folder, result_folder, run_identity
from rpft.train.save_log import SaveLog
from rpft.train.saver import Saver

MOST_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class _InFlight:
    """A submitted step whose update has not been waited for."""

    step: int
    tokens: int
    trained_tokens: int


def to_host_batch(batch: Microbatch) -> HostBatch:
    """What the engine needs of a microbatch: labels become the places that are scored and their targets."""
    flat = batch.labels.flatten()
    trained_at = (flat >= 0).nonzero().flatten()
    return HostBatch(batch.input_ids, batch.position_ids, trained_at, flat[trained_at])


class Trainer:
    """Carries out a prepared run. ``run`` blocks until it is done, interrupted or failed."""

    def __init__(self, prepared: Prepared, reporter: Reporter) -> None:
        recipe = prepared.recipe
        self._prepared, self._reporter, self._recipe = prepared, reporter, recipe
        self._data = prepared.data
        self._num_steps = prepared.data.order.num_steps
        self._delayed = recipe.optimizer.update == "delayed"
        self.output_dir = Path(recipe.output_dir)
        self._metrics = MetricsFile(self.output_dir)
        self._interrupts = Interrupts(reporter.say)
        self._saves = SaveLog(reporter)
        self._failure = Failure()
        self._in_flight: _InFlight | None = None
        self._settled = False
        self._eval_batches = (
            [to_host_batch(b) for b in self._data.evaluation()] if self._data.eval is not None else []
        )
        self._state = TrainState(0, 0, 0, 0, None, None, run_identity(prepared), about_run(prepared))
        """After the last step whose update has been waited for."""

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest whole checkpoint that the run has written or come from."""
        return self._saves.last_checkpoint

    @property
    def last_step(self) -> int:
        """The last step that is finished; 0 before the first."""
        return self._state.step

    def run(self, resume_from: Path | None) -> Path:
        """Trains to the last step and gives the folder of the result. ``resume_from``: a checkpoint folder."""
        self._store = HostStore(
            self._prepared.layouts,
            self._prepared.devices[0].allocate_host,
            two_copies=self._delayed,
            whole_masters=self._prepared.target.whole_masters,
            gradient_dtype=self._prepared.gradient_dtype,
        )
        load_checkpoint(self._prepared.checkpoint, self._prepared.skeleton, self._store, self._reporter.loading)
        seed = self._recipe.train.seed
        if self._prepared.peft_model is not None:
            initialise_lora(self._prepared.skeleton, self._store, seed)
        verify_head(self._prepared.skeleton, self._store, self._prepared.dtype)
        if resume_from is not None:
            restore(resume_from, self._store, lagging=self._delayed)
            self._saves.last_checkpoint = resume_from
            self._state = replace(read_state(resume_from), run=self._state.run, about=self._state.about)
            missing = self._metrics.keep_until(self._state.step)
            if missing:
                self._reporter.say(f"metrics.jsonl lacks {len(missing)} of the steps up to {self._state.step}")
        for device in self._prepared.devices:
            device.reset_peak()  # what measuring took is not the run's
        delays = Delays(self._recipe.engine.inject_delays)
        self._saver = Saver(
            checkpoint_folder(self._recipe),
            self._store,
            self._failure,
            lagging=self._delayed,
            may_make_room=self._recipe.checkpoint.make_room,
            before_commit=self._metrics.sync,
        )
        self._optimizer = self._make_optimizer(delays)
        self._engine = Engine(
            self._prepared.skeleton,
            self._store,
            self._prepared.plan,
            self._prepared.devices,
            functions=self._prepared.functions,
            max_tokens=self._recipe.train.micro_batch_size * self._data.longest,
            seed=seed,
            update_lag=1 if self._delayed else 0,
            send_update=self._optimizer.submit,
            failure=self._failure,
            delays=delays,
            lagging=resume_from is not None and self._delayed,
        )
        self._watchdog = Watchdog(
            [*self._engine.streams, self._optimizer.stream],
            self._recipe.engine.stall_seconds,
            self._failure,
            lambda: self._saver.progress_bytes,
        )
        with self._interrupts.caught():
            try:
                self._train()
            except BaseException as error:
                self._failure.set(error)  # what is queued is not worth waiting for
                self._close(at_once=isinstance(error, StoppedAtOnce))
                raise
            self._close()
            folder = self._save_result()
            self._metrics.sync()
            return folder

    def _make_optimizer(self, delays: Delays) -> HostOptimizer:
        train, settings = self._recipe.train, self._recipe.optimizer
        schedule = Schedule(
            train.lr_scheduler,
            train.learning_rate,
            self._num_steps,
            train.warmup_ratio,
            train.min_lr_ratio,
            train.decay_ratio,
        )
        return HostOptimizer(
            self._store,
            AdamW(settings.betas, settings.eps, settings.weight_decay),
            schedule,
            train.max_grad_norm,
            self._failure,
            delays,
            updates_applied=self._state.updates_applied,
            skipped_steps=self._state.skipped_steps,
            kernels=self._prepared.one_pass,
            before_update=self._saver.before_update,
        )

    # -- the loop ------------------------------------------------------------------------------------------

    def _train(self) -> None:
        first = self._state.step + 1
        self._reporter.begin(first, self._num_steps)
        self._last_save = time.monotonic()
        if self._eval_batches and first == 1:
            self._evaluate(0)
        self._mark = time.monotonic()
        for step in range(first, self._num_steps + 1):
            batches = self._data.step(step)
            self._engine.submit_step(step, [to_host_batch(b) for b in batches])
            self._finish_in_flight()
            self._in_flight = _InFlight(
                step, sum(b.tokens for b in batches), sum(b.trained_tokens for b in batches)
            )
            self._at_boundary(step)
        self._rest()
        if self._eval_batches and not self._metrics.has_evaluation(self._num_steps):
            self._evaluate(self._num_steps)
        self._saver.wait()
        self._saves.note(self._saver.take_reports())

    def _at_boundary(self, step: int) -> None:
        """What is due between ``step``, which is in flight, and the next."""
        every, last = self._recipe.train.eval_every, step == self._num_steps
        evaluate = bool(self._eval_batches) and every is not None and step % every == 0 and not last
        best = False
        if evaluate:
            if not self._delayed:
                self._rest()
            best = self._evaluate(step)
            self._mark = time.monotonic()
        asked = self._interrupts.asked if not last else None
        if asked or self._save_due(step) or (best and self._recipe.checkpoint.keep_best):
            self._save(step)
        if asked:
            self._finish_in_flight()
            self._saver.wait()
            self._saves.note(self._saver.take_reports(), may_fail=False)
            assert self._saves.last_checkpoint is not None
            raise Interrupted(asked, step, self._saves.last_checkpoint)
        self._saves.note(self._saver.take_reports())

    def _rest(self) -> None:
        """Waits until every submitted step is applied; what comes reads the latest weights."""
        self._engine.flush()
        self._finish_in_flight()
        done = self._optimizer.stream.record(Event())
        with self._watchdog.expecting("the last update"):
            while not done.wait(POLL_SECONDS):
                self._failure.raise_if_failed()

    def _finish_in_flight(self) -> None:
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
        with self._watchdog.expecting(f"step {flight.step}"):
            result = self._optimizer.wait(flight.step)
        if not self._settled:
            self._settled = True
            self._engine.settle()
        now = time.monotonic()
        seconds, self._mark = now - self._mark, now
        record = StepRecord(
            step=flight.step,
            epoch=round(self._data.order.epoch(flight.step - 1), 6),
            loss=result.loss_sum / flight.trained_tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            trained_tokens=flight.trained_tokens,
            tokens=flight.tokens,
            tokens_per_second=flight.tokens / seconds,
            step_seconds=seconds,
            skipped_steps=result.skipped_steps,
            host_rss_bytes=psutil.Process().memory_info().rss,
            devices=[{"name": d.name, "peak_bytes": d.peak_bytes()} for d in self._prepared.devices],
        )
        self._metrics.append(record)
        self._state = replace(
            self._state,
            step=flight.step,
            updates_applied=flight.step - result.skipped_steps,
            skipped_steps=result.skipped_steps,
            skipped_in_a_row=self._state.skipped_in_a_row + 1 if result.skipped else 0,
        )
        if self._saver.armed_step == flight.step:
            self._saver.start(self._state)
        self._reporter.stepped(record)
        if self._state.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            steps = range(flight.step - MOST_SKIPPED_IN_A_ROW + 1, flight.step + 1)
            folder = keep_batches(self.output_dir, self._data, steps)
            raise not_finite(steps, self._prepared.dtype == torch.float16, folder)

    def _evaluate(self, step: int) -> bool:
        """Evaluates with the weights that the next step will see; whether the loss is the lowest so far."""
        tokens = sum(batch.trained_tokens for batch in self._eval_batches)
        with self._watchdog.expecting(f"the evaluation after step {step}"):
            loss = self._engine.evaluate(self._eval_batches) / tokens
        record = EvalRecord(step, loss, tokens)
        self._metrics.append(record)
        self._reporter.evaluated(record)
        lowest = self._state.best_eval_loss
        best = step > 0 and math.isfinite(loss) and (lowest is None or loss < lowest)
        if best:
            self._state = replace(self._state, best_step=step, best_eval_loss=loss)
        return best

    # -- saving --------------------------------------------------------------------------------------------

    def _save_due(self, step: int) -> bool:
        settings = self._recipe.checkpoint
        by_steps = settings.every_steps is not None and step % settings.every_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_steps or (settings.every_minutes is not None and minutes >= settings.every_minutes)

    def _save(self, step: int) -> None:
        """Has the state after ``step`` written as soon as that step is finished."""
        self._saver.arm(step)
        self._last_save = time.monotonic()
        if self._in_flight is None:
            self._saver.start(self._state)

    def _save_result(self) -> Path:
        prepared = self._prepared
        folder = result_folder(self._recipe)
        save_result(
            folder, prepared.skeleton, self._store, prepared.config, self._data.tokenizer, prepared.peft_model
        )
        self._reporter.saved(folder)
        return folder

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self, at_once: bool = False) -> None:
        """Ends all threads. A checkpoint that is being written is finished, since no update can reach it now."""
        self._engine.close()
        self._optimizer.close()
        self._optimizer.join(5.0)
        if at_once:
            self._saver.give_up()
        self._saver.wait()
        self._watchdog.close()
        self._saves.note(self._saver.take_reports())
