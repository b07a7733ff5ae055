"""The evaluations of a run: when one is due, and what it says of the weights at hand."""

from __future__ import annotations

import math
from dataclasses import replace

from rpft.train.checkpoint import TrainState
from rpft.train.flight import to_host_batch
from rpft.train.machinery import Machinery
from rpft.train.metrics import EvalRecord, MetricsFile
from rpft.train.prepare import Prepared
from rpft.train.reporter import Reporter
from rpft.train.rows import RunData


class Evaluations:
    """On the held-out rows, where there are any; all from the main thread."""

    def __init__(self, prepared: Prepared, metrics: MetricsFile, reporter: Reporter) -> None:
        self._metrics, self._reporter = metrics, reporter
        self._every, self._num_steps = prepared.recipe.train.eval_every, prepared.data.order.num_steps
        self.divide(prepared.data)

    def divide(self, data: RunData) -> None:
        """From now on rows are evaluated in the microbatches of ``data``."""
        self._batches = [] if data.eval is None else [to_host_batch(b) for b in data.evaluation()]

    def begin_at(self, step: int) -> None:
        """What is known of steps after ``step`` is forgotten."""
        self.last_step = step or -1
        """The last step after which there was an evaluation, or none is to be made up for; -1 before the first."""

    @property
    def first_due(self) -> bool:
        """Whether the weights that the run begins with are still to be evaluated."""
        return bool(self._batches) and self.last_step < 0

    @property
    def final_due(self) -> bool:
        """Whether those that it ends with are."""
        return bool(self._batches) and not self._metrics.has_evaluation(self._num_steps)

    def due(self, step: int) -> bool:
        """Whether there is one after ``step``, on the way."""
        every, last = self._every, step == self._num_steps
        return bool(self._batches) and every is not None and step % every == 0 and not last

    def evaluate(self, step: int, machinery: Machinery, state: TrainState) -> TrainState:
        """Evaluates with the weights that the step after ``step`` will see; gives ``state`` with the best step."""
        tokens = sum(batch.trained_tokens for batch in self._batches)
        with machinery.watchdog.expecting(f"the evaluation after step {step}"):
            loss = machinery.engine.evaluate(self._batches) / tokens
        self.last_step = step
        record = EvalRecord(step, loss, tokens)
        self._metrics.append(record)
        self._reporter.evaluated(record)
        lowest = state.best_eval_loss
        if step > 0 and math.isfinite(loss) and (lowest is None or loss < lowest):
            return replace(state, best_step=step, best_eval_loss=loss)
        return state
