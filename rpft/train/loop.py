"""The training loop: one for full, LoRA, sync and delayed runs, on any pool of workers.

The loop stays one step ahead of the engine: while step t computes, step t + 1 is queued behind it, so that the
end of one step and the start of the next overlap. It comes to rest only where state must stand still: at a
checkpoint, at an evaluation of exact updates, at the end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rpft.data.batches import Microbatch
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.errors import UserError
from rpft.model.adapters import initialise_lora
from rpft.model.checkpoint import load_checkpoint
from rpft.model.host_store import HostStore
from rpft.model.save import save_result
from rpft.model.verify import verify_head
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import CheckpointFolder, TrainState, read_state, refuse_another_run, restore
from rpft.train.metrics import EvalRecord, MetricsFile, StepRecord
from rpft.train.prepare import Prepared
from rpft.train.reporter import Reporter

MOST_SKIPPED_IN_A_ROW = 3


class TrainingStopped(RuntimeError):
    """The run cannot go on usefully; the message says why and what to change."""


class Interrupted(BaseException):
    """The user asked to stop; the run is saved at ``checkpoint``."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}")
        self.step, self.checkpoint = step, checkpoint


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


def run_identity(prepared: Prepared) -> dict[str, Any]:
    """What decides the numbers of a run; workers, plan and logging do not.

    Device and kernels decide roundings only, and a run may go on with others.
    """
    recipe, order = prepared.recipe, prepared.data.order
    return {
        "model": recipe.model.model_dump(mode="json"),
        "adapter": recipe.adapter.model_dump(mode="json") if recipe.adapter else None,
        "train": recipe.train.model_dump(mode="json", exclude={"eval_every", "resume_from_checkpoint"}),
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "engine": {"host_gradients": str(prepared.gradient_dtype).removeprefix("torch.")},
        "data": {
            "items": len(prepared.data.items),
            "tokens": prepared.data.train.tokens,
            "trained_tokens": prepared.data.train.trained_tokens,
        },
        "num_steps": order.num_steps,
    }


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
        self._checkpoints = _checkpoints(recipe)
        self._run = run_identity(prepared)
        self._state = TrainState(0, 0, 0, None, None, self._run)
        self._failure = Failure()
        self._stop_asked = threading.Event()
        self._in_flight: _InFlight | None = None
        self._settled = False
        self._best_step: int | None = None
        self._best_loss: float | None = None
        self._eval_batches = (
            [to_host_batch(b) for b in self._data.evaluation()] if self._data.eval is not None else []
        )

    def run(self, resume_from: Path | None) -> Path:
        """Trains to the last step and gives the folder of the result. ``resume_from``: a checkpoint folder."""
        if resume_from is not None:
            self._state = read_state(resume_from)
            self._best_step, self._best_loss = self._state.best_step, self._state.best_eval_loss
        self._store = HostStore(
            self._prepared.layouts,
            self._prepared.devices[0].allocate_host,
            separate_masters=self._prepared.separate_masters,
            gradient_dtype=self._prepared.gradient_dtype,
        )
        load_checkpoint(self._prepared.checkpoint, self._prepared.skeleton, self._store, self._reporter.loading)
        seed = self._recipe.train.seed
        if self._prepared.peft_model is not None:
            initialise_lora(self._prepared.skeleton, self._store, seed)
        verify_head(self._prepared.skeleton, self._store, self._prepared.dtype)
        if resume_from is not None:
            restore(resume_from, self._store)
            self._metrics.keep_until(self._state.step)
        for device in self._prepared.devices:
            device.reset_peak()  # what measuring took is not the run's
        delays = Delays(self._recipe.engine.inject_delays)
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
        )
        with self._signals():
            try:
                self._train()
            except BaseException as error:
                self._failure.set(error)  # what is queued is not worth waiting for
                raise
            finally:
                self._close()
            return self._save_result()

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
        algorithm = AdamW(settings.betas, settings.eps, settings.weight_decay)
        return HostOptimizer(
            self._store,
            algorithm,
            schedule,
            train.max_grad_norm,
            self._failure,
            delays,
            updates_applied=self._state.updates_applied,
            skipped_steps=self._state.skipped_steps,
            kernels=self._prepared.one_pass,
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

    def _at_boundary(self, step: int) -> None:
        """What is due between ``step``, which is in flight, and the next."""
        stop = self._stop_asked.is_set()
        every = self._recipe.train.eval_every
        evaluate = bool(self._eval_batches) and every is not None and step % every == 0 and step < self._num_steps
        save = stop or self._save_due(step)
        if save or (evaluate and not self._delayed):
            self._rest()
        best = self._evaluate(step) if evaluate else False
        if save or (best and self._recipe.checkpoint.keep_best):
            self._rest()
            path = self._save(step)
            if stop and step < self._num_steps:
                raise Interrupted(step, path)
        if save or evaluate:
            self._mark = time.monotonic()

    def _rest(self) -> None:
        """Waits until every submitted step is applied; delayed updates are applied now."""
        self._engine.flush()
        self._finish_in_flight()

    def _finish_in_flight(self) -> None:
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
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
        self._reporter.stepped(record)
        if result.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            raise TrainingStopped(
                f"steps {flight.step - MOST_SKIPPED_IN_A_ROW + 1} to {flight.step} had a loss or gradient that is"
                " not finite and were skipped, so nothing was lost; the weights are those before them."
                + (" float16 overflows above 65,504: use model.dtype=bfloat16." if self._is_half() else "")
                + " Lower train.learning_rate, or look at the rows of these steps."
            )

    def _is_half(self) -> bool:
        return self._prepared.dtype == torch.float16

    def _evaluate(self, step: int) -> bool:
        """Evaluates with the weights that the next step will see; whether the loss is the lowest so far."""
        tokens = sum(batch.trained_tokens for batch in self._eval_batches)
        loss = self._engine.evaluate(self._eval_batches) / tokens
        record = EvalRecord(step, loss, tokens)
        self._metrics.append(record)
        self._reporter.evaluated(record)
        best = step > 0 and (self._best_loss is None or loss < self._best_loss)
        if best:
            self._best_step, self._best_loss = step, loss
        return best

    # -- saving --------------------------------------------------------------------------------------------

    def _save_due(self, step: int) -> bool:
        settings = self._recipe.checkpoint
        by_steps = settings.every_steps is not None and step % settings.every_steps == 0
        minutes = (time.monotonic() - self._last_save) / 60
        return by_steps or (settings.every_minutes is not None and minutes >= settings.every_minutes)

    def _save(self, step: int) -> Path:
        self._state = TrainState(
            step,
            self._optimizer.updates_applied,
            self._optimizer.skipped_steps,
            self._best_step,
            self._best_loss,
            self._run,
        )
        path = self._checkpoints.save(self._state, self._store)
        self._last_save = time.monotonic()
        self._reporter.saved(path)
        return path

    def _save_result(self) -> Path:
        prepared = self._prepared
        folder = _result_folder(self._recipe)
        save_result(
            folder, prepared.skeleton, self._store, prepared.config, self._data.tokenizer, prepared.peft_model
        )
        self._reporter.saved(folder)
        return folder

    # -- the end -------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A first SIGINT or SIGTERM asks for a save at the next step boundary; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}

        def leave(number: int, frame: Any) -> None:
            for n in numbers:
                signal.signal(n, signal.SIG_IGN)  # closing takes seconds, and a third signal would cut it short
            raise KeyboardInterrupt

        def ask(number: int, frame: Any) -> None:
            self._stop_asked.set()
            for n in numbers:
                signal.signal(n, leave)
            with suppress(RuntimeError):  # printing is not reentrant, and the signal may have come inside of it
                self._reporter.say("stopping after this step, to save; once more to stop at once without saving")

        for number in numbers:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _close(self) -> None:
        """Ends all threads of the engine and the optimizer."""
        self._engine.close()
        self._optimizer.close()
        self._optimizer.join(5.0)


def _checkpoints(recipe: Recipe) -> CheckpointFolder:
    settings = recipe.checkpoint
    return CheckpointFolder(Path(recipe.output_dir), settings.keep_last, settings.keep_best)


def _result_folder(recipe: Recipe) -> Path:
    return Path(recipe.output_dir) / ("model" if recipe.adapter is None else "adapter")


def find_checkpoint(recipe: Recipe, wanted: bool | str) -> Path | None:
    """The checkpoint to resume from: ``True`` the newest, a path that one, ``False`` none.

    Refused is a new run in a directory which holds one already, so that nothing is lost. To be called before
    ``prepare``, which takes minutes where layers are compiled and measured.
    """
    output_dir = Path(recipe.output_dir)
    if wanted:
        path = _checkpoints(recipe).newest() if wanted is True else Path(wanted)
        read_state(path)
        return path
    if MetricsFile(output_dir).path.exists():
        raise UserError(
            f"output_dir {output_dir} already holds a run: give --resume to go on with it, or another output_dir"
        )
    result = _result_folder(recipe)
    if result.exists():
        raise UserError(
            f"output_dir {output_dir} holds {result.name}/, which the result would replace: give another"
        )
    return None


def refuse_unless_same_run(prepared: Prepared, checkpoint: Path) -> None:
    """UserError where ``checkpoint`` is of another run than ``prepared``."""
    refuse_another_run(checkpoint, read_state(checkpoint), run_identity(prepared))
