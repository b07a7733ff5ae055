"""The training loop: one for full, LoRA, sync and delayed runs, on any pool of workers.

The loop stays one step ahead of the engine: while step t computes, step t + 1 is queued behind it, so that the
end of one step and the start of the next overlap; t + 2, too, where updates are late and workers many. It comes to
rest only where state must stand still: at an evaluation of exact updates, at the end. A checkpoint is written
behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rpft.engine.failure import Failure, out_of_device_memory
from rpft.model.frozen_file import frozen_files
from rpft.model.save import save_result
from rpft.optim.host_optimizer import UpdateResult
from rpft.train.checkpoint import TrainState, read_state
from rpft.train.checkpoint_layers import restore
from rpft.train.evaluation import Evaluations
from rpft.train.faults import keep_batches, not_finite
from rpft.train.flight import Flight
from rpft.train.interrupts import Interrupted, Interrupts, StoppedAtOnce
from rpft.train.layer_norms import LayerNormsFile
from rpft.train.machinery import Machinery
from rpft.train.metrics import MetricsFile
from rpft.train.output_dir import checkpoint_folder, result_folder
from rpft.train.plan_changes import note_faster, note_smaller, with_plan_of
from rpft.train.prepare import Prepared
from rpft.train.refine import FirstSteps
from rpft.train.reporter import Reporter
from rpft.train.resume import about_run, run_identity
from rpft.train.rewind import Rewinds
from rpft.train.rows import use_template
from rpft.train.save_log import SaveLog
from rpft.train.saver import Saver
from rpft.train.saves import Saves
from rpft.train.spikes import Spike
from rpft.train.tracing import StepTracing
from rpft.train.watched import Watched
from rpft.train.weights import load_weights

MOST_SKIPPED_IN_A_ROW = 3


class Trainer:
    """Carries out a prepared run. ``run`` blocks until it is done, interrupted or failed."""

    def __init__(self, prepared: Prepared, reporter: Reporter) -> None:
        recipe = prepared.recipe
        self._prepared, self._reporter, self._recipe = prepared, reporter, recipe
        self._data = prepared.data
        self._num_steps = prepared.data.order.num_steps
        self.output_dir = Path(recipe.output_dir)
        self._metrics = MetricsFile(self.output_dir)
        self._layer_norms = LayerNormsFile(self.output_dir)
        self._interrupts = Interrupts(reporter.say)
        self._save_log = SaveLog(reporter)
        self._failure = Failure()
        self._settled = False
        self._evaluations = Evaluations(prepared, self._metrics, reporter)
        self._state = TrainState(0, 0, 0, 0, None, None, run_identity(prepared), about_run(prepared))
        """After the last step whose update has been waited for."""

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest whole checkpoint that the run has written or come from."""
        return self._save_log.last_checkpoint

    @property
    def last_step(self) -> int:
        """The last step that is finished; 0 before the first."""
        return self._state.step

    def run(self, resume_from: Path | None) -> Path:
        """Trains to the last step and gives the folder of the result. ``resume_from``: a checkpoint folder."""
        recipe = self._recipe
        self._store = load_weights(self._prepared, self.output_dir, self._reporter.loading)
        self._saver = Saver(
            checkpoint_folder(recipe),
            self._store,
            self._failure,
            lagging=self._prepared.delayed,
            may_make_room=recipe.checkpoint.make_room,
            before_commit=self._metrics.sync,
        )
        self._saves = Saves(recipe.checkpoint, self._saver, self._save_log)
        self._rewinds = Rewinds(recipe, self._store, self._metrics, self._layer_norms, self._saves, self._reporter)
        if resume_from is not None:
            restore(resume_from, self._store, lagging=self._prepared.delayed)
            self._save_log.last_checkpoint = resume_from
            self._state = replace(read_state(resume_from), run=self._state.run, about=self._state.about)
            missing = self._metrics.keep_until(self._state.step)
            self._layer_norms.keep_until(self._state.step)
            if missing:
                self._reporter.say(f"metrics.jsonl lacks {len(missing)} of the steps up to {self._state.step}")
            self._rewinds.begin()
        for device in self._prepared.devices:
            device.reset_peak()  # what measuring took is not the run's
        self._begin_at(self._state.step)
        self._first_steps = FirstSteps(self._prepared, self._state.step + 1, self._num_steps)
        self._machinery = Machinery(self._prepared, self._store, self._saver, self._failure, self._state)
        with self._interrupts.caught():
            try:
                self._train()
            except BaseException as error:
                self._failure.set(error)  # what is queued is not worth waiting for
                self._close(at_once=isinstance(error, StoppedAtOnce))
                raise
            self._close()
            self._store.drop_gradients()
            folder = self._save_result()
            self._metrics.sync()
            for path in frozen_files(self.output_dir):  # until now a resumed run could have used it again
                path.unlink()
            if self._store.moments_file is not None:
                self._store.moments_file.close()
            return folder

    def _begin_at(self, step: int) -> None:
        """What is known of steps after ``step`` is forgotten."""
        self._in_flight: deque[Flight] = deque()
        """The steps that the engine was given and that are not over, the oldest first."""
        self._submitted = step
        """The last step that the engine was given and that is not undone."""
        self._past_boundary = step
        """The last step after which all that is due was done."""
        self._evaluations.begin_at(step)

    # -- the loop ------------------------------------------------------------------------------------------

    def _train(self) -> None:
        streams = self._machinery.streams
        watched = Watched(self._prepared, streams)
        steps = self._recipe.engine.trace_steps
        self._tracing = StepTracing(self.output_dir, steps, streams, watched, self._reporter.say)
        self._reporter.begin(self._state.step + 1, self._num_steps, watched)
        self._saves.begin()
        stop = self._stop_of(self._begin)
        while stop is not None:
            if isinstance(stop, Spike):
                self._go_back(stop)
                stop = self._stop_of(self._begin)
            else:
                self._make_smaller(stop)
                stop = self._stop_of(self._go_on)

    @staticmethod
    def _stop_of(work: Callable[[], None]) -> Exception | None:
        """Does ``work``; gives what stopped it where the run can go on: a spike, or a device without memory."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, Spike) and not out_of_device_memory(error):
                raise
            return error
        return None

    def _begin(self) -> None:
        self._machinery.start()
        self._go_on()

    def _go_on(self) -> None:
        """Trains from where the run stands to its end."""
        self._mark = time.monotonic()
        if self._evaluations.first_due:
            self._evaluate(0)
        self._at_boundary(self._submitted)
        self._tracing.begin(self._submitted, self._num_steps)
        for step in range(self._submitted + 1, self._num_steps + 1):
            flight, machinery = Flight(step, self._data.step(step)), self._machinery
            if step in self._state.passed_over:
                self._finish_in_flight()
                self._note(flight, machinery.optimizer.pass_over(step))
            else:
                self._first_steps.before(step, machinery.streams())
                machinery.submit_step(step, flight.host_batches())
                self._in_flight.append(flight)
                # One that is to be saved is not kept waiting, since the update after it waits for its save.
                saved_next = self._saver.armed_step == self._in_flight[0].step
                self._finish_in_flight(left=1 if saved_next else machinery.steps_ahead)
            self._submitted = step
            self._at_boundary(step)
            better = self._first_steps.after(self._state.step)
            if better is not None:
                self._change_plan(better)
        self._rest()
        if self._evaluations.final_due:
            self._evaluate(self._num_steps)
        self._tracing.close()
        self._saves.finish()

    def _make_smaller(self, error: BaseException) -> None:
        """After ``error``, a device without memory, begins anew with a smaller plan, behind the last update."""
        self._machinery.start_smaller(error)
        done, before = self._machinery.optimizer.last_step, self._prepared
        while self._in_flight and self._in_flight[-1].step > done:
            self._in_flight.pop()
        self._submitted = done
        self._first_steps.forget()
        now = self._machinery.prepared
        self._go_on_with(now)
        self._data = now.data
        self._evaluations.divide(now.data)
        note_smaller(self._metrics, self._reporter, done, error, before, now)

    def _go_on_with(self, now: Prepared) -> None:
        """Notes the plan of ``now`` as the run's, from the next step on."""
        self._settled = False
        self._prepared = now
        self._state = with_plan_of(self._state, now)

    def _change_plan(self, now: Prepared) -> None:
        """Goes on with the plan of ``now`` behind the steps in flight; no number depends on it."""
        before = self._prepared.plan
        self._finish_in_flight()
        self._tracing.drop()
        self._machinery.change_plan(now)
        self._go_on_with(now)
        self._tracing.begin(self._submitted, self._num_steps)
        note_faster(self._reporter, self._state.step, before, now)
        self._mark = time.monotonic()

    def _at_boundary(self, step: int) -> None:
        """What is due between ``step``, which is in flight, and the next, unless it was done."""
        if step <= self._past_boundary:
            return
        evaluate = self._evaluations.due(step)
        if evaluate and self._evaluations.last_step < step:
            if self._prepared.delayed:
                self._finish_in_flight(left=1)
            else:
                self._rest()
            self._evaluate(step)
            self._mark = time.monotonic()
        best = evaluate and self._state.best_step == step
        asked = self._interrupts.asked if step != self._num_steps else None
        if asked or self._saves.due(step) or (best and self._recipe.checkpoint.keep_best):
            self._save(step)
        if asked:
            self._finish_in_flight()
            self._saves.finish(may_fail=False)
            assert self.last_checkpoint is not None
            self._tracing.close()
            raise Interrupted(asked, step, self.last_checkpoint)
        self._saves.note()
        self._past_boundary = step

    def _rest(self) -> None:
        """Waits until every submitted step is applied; what comes reads the latest weights."""
        self._machinery.engine.flush()
        self._finish_in_flight()
        self._machinery.rest()

    def _finish_in_flight(self, left: int = 0) -> None:
        """Waits for the oldest steps that are under way, until so many are left."""
        while len(self._in_flight) > left:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flight, machinery = self._in_flight[0], self._machinery
        with machinery.watchdog.expecting(f"step {flight.step}"):
            result = machinery.optimizer.wait(flight.step)
        self._in_flight.popleft()
        if not self._settled:
            self._settled = True
            machinery.engine.settle()
            # By now the run has taken what else it takes.
            prepared = self._prepared
            self._saver.take_memory(prepared.copies_bytes, prepared.target.ram_reserve_bytes)
        self._note(flight, result)
        loss = result.loss_sum / flight.trained_tokens
        self._rewinds.see(flight.step, loss, self._data, self._state.rewinds)

    def _note(self, flight: Flight, result: UpdateResult) -> None:
        """What follows from a step that is over, but for a spike of its loss."""
        now = time.monotonic()
        seconds, self._mark = now - self._mark, now
        epoch = self._data.order.epoch(flight.step - 1)
        record = flight.record(result, seconds, epoch, self._prepared.devices)
        self._metrics.append(record)
        self._layer_norms.append(flight.step, result.layer_norms)
        self._state = replace(
            self._state,
            step=flight.step,
            updates_applied=flight.step - result.skipped_steps,
            skipped_steps=result.skipped_steps,
            skipped_in_a_row=result.skipped_in_a_row,
        )
        if self._saver.armed_step == flight.step:
            self._saver.start(self._state)
        self._reporter.stepped(record)
        self._tracing.passed(record.step)
        if self._state.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            steps = range(flight.step - MOST_SKIPPED_IN_A_ROW + 1, flight.step + 1)
            rows = keep_batches(self.output_dir, self._data, steps)
            raise not_finite(steps, self._prepared.dtype == torch.float16, rows)

    def _go_back(self, spike: Spike) -> None:
        before = self._state
        self._state = self._rewinds.go_back(spike, before, self._machinery)
        self._rewinds.forget(spike, before, self._state)
        self._begin_at(self._state.step)
        self._first_steps.forget()
        self._settled = False

    def _evaluate(self, step: int) -> None:
        self._state = self._evaluations.evaluate(step, self._machinery, self._state)

    # -- saving --------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        """Has the state after ``step`` written as soon as that step is finished."""
        self._finish_in_flight(left=1)  # one of them may be being saved
        self._saves.arm(step)
        if not self._in_flight:
            self._saver.start(self._state)

    def _save_result(self) -> Path:
        prepared = self._prepared
        folder, tokenizer = result_folder(self._recipe), use_template(self._data.tokenizer, self._recipe.data)
        save_result(folder, prepared.skeleton, self._store, prepared.config, tokenizer, prepared.peft_model)
        self._reporter.saved(folder)
        return folder

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self, at_once: bool = False) -> None:
        """Ends all threads. A checkpoint that is being written is finished, since no update can reach it now."""
        self._machinery.close(at_once)
        self._saves.note()
