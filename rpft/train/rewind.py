"""Going back behind a spike of the loss: to which checkpoint, if the run may, and what is then forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rpft.model.host_store import HostStore
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import TrainState, read_state
from rpft.train.checkpoint_layers import restore
from rpft.train.faults import LOSS_SPIKE, keep_batches, too_many_spikes
from rpft.train.layer_norms import LayerNormsFile
from rpft.train.machinery import Machinery
from rpft.train.metrics import MetricsFile, RewindRecord
from rpft.train.output_dir import checkpoint_folder
from rpft.train.reporter import Reporter
from rpft.train.rows import RunData
from rpft.train.saves import Saves
from rpft.train.spikes import Spike, SpikeGuard


class Rewinds:
    """Those of one run; all from the main thread."""

    def __init__(
        self,
        recipe: Recipe,
        store: HostStore,
        metrics: MetricsFile,
        layer_norms: LayerNormsFile,
        saves: Saves,
        reporter: Reporter,
    ) -> None:
        self._store, self._metrics, self._layer_norms = store, metrics, layer_norms
        self._saves, self._reporter = saves, reporter
        self._settings, self._checkpoints = recipe.checkpoint, checkpoint_folder(recipe)
        self._output_dir, self._lagging = Path(recipe.output_dir), recipe.optimizer.update == "delayed"
        self._guard = SpikeGuard(recipe.checkpoint.spike_deviations, recipe.checkpoint.spike_steps)

    def begin(self) -> None:
        """Sees the losses of the steps that the run has done before."""
        self._guard.begin(self._metrics.losses())

    def see(self, step: int, loss: float, data: RunData, rewinds: int) -> None:
        """Where a spike of the loss ends at ``step``: raises Spike, or the end of the run, or says why neither.

        ``rewinds``: how often the run has gone back.
        """
        steps = self._guard.see(step, loss)
        if steps is None:
            return
        self._saves.finish()
        found = self._checkpoints.newest_before(steps[0])
        rows = keep_batches(self._output_dir, data, steps, LOSS_SPIKE)
        if rewinds >= self._settings.most_rewinds:
            raise too_many_spikes(steps, rewinds, rows, found)
        if found is not None:
            raise Spike(steps, found)
        self._reporter.say(
            f"the loss of steps {steps[0]} to {steps[-1]} was far above that of the steps before, and there is no"
            f" checkpoint from before them to go back to: the run goes on. Look at their rows{rows}"
        )

    def go_back(self, spike: Spike, before: TrainState, machinery: Machinery) -> TrainState:
        """To the checkpoint before ``spike``; gives its state. ``before``: that of the run, behind the spike.

        To be followed by ``forget``.
        """
        checkpoint = spike.checkpoint

        def read() -> TrainState:
            restore(checkpoint, self._store, lagging=self._lagging)
            state = read_state(checkpoint)
            passed_over = sorted({*before.passed_over, *state.passed_over, *spike.steps})
            changed = {"passed_over": passed_over, "rewinds": before.rewinds + 1}
            return replace(state, run=before.run, about=before.about, **changed)

        return machinery.go_back(read, spike)

    def forget(self, spike: Spike, before: TrainState, state: TrainState) -> None:
        """Drops what the run's files say of the steps after ``state``, which it went back to from ``before``."""
        checkpoint = spike.checkpoint
        self._checkpoints.remove_after(checkpoint)
        self._saves.go_back(checkpoint)
        self._metrics.keep_until(state.step)
        self._layer_norms.keep_until(state.step)
        self._metrics.append(RewindRecord(state.step, before.step, state.passed_over))
        self.begin()
        self._reporter.say(f"{spike}: back to {checkpoint}, and these steps will be passed over")
