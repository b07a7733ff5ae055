"""The optimizer's thread: takes updates in order, checks them, clips them, applies them layer by layer.

Nothing is written before the whole step's gradient has been seen to be finite: a step that is not is skipped.
Layers are updated in forward order, so that the next step's first uploads wait the least.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch

from rpft.engine.controller import Update
from rpft.engine.failure import POLL_SECONDS, Failure
from rpft.engine.streams import Delays, Event, Stream
from rpft.model.host_store import HostStore
from rpft.model.layout import ALIGNMENT_ELEMENTS, Piece
from rpft.optim.adamw import AdamW
from rpft.optim.schedule import Schedule


@dataclass(frozen=True)
class UpdateResult:
    """What became of one step's update."""

    step: int
    loss_sum: float
    """Cross-entropy summed over the step's trained tokens."""
    learning_rate: float
    grad_norm: float
    """Global norm of the mean gradient before clipping; not finite for a skipped step."""
    skipped: bool
    skipped_in_a_row: int
    skipped_steps: int
    """Skipped since the run began, this one included."""


class HostOptimizer:
    """Applies updates on a thread of its own. ``submit`` never blocks; ``wait`` gives a step's result."""

    def __init__(
        self,
        store: HostStore,
        algorithm: AdamW,
        schedule: Schedule,
        max_grad_norm: float | None,
        failure: Failure,
        delays: Delays,
        updates_applied: int = 0,
        skipped_steps: int = 0,
    ) -> None:
        """``updates_applied``: updates that the store's moments have had; both counts are of a resumed run."""
        self._store, self._algorithm, self._schedule = store, algorithm, schedule
        self._max_grad_norm = max_grad_norm
        self._failure, self._pause = failure, delays.of("optimizer")
        self.updates_applied = updates_applied
        self.skipped_steps = skipped_steps
        self._skipped_in_a_row = 0
        self._results: dict[int, UpdateResult] = {}
        self._changed = threading.Condition()
        self._stream = Stream("optimizer", failure, delays)

    def submit(self, update: Update) -> None:
        self._stream.run(lambda: self._complete(update), f"the update of step {update.ticket.step}")

    def wait(self, step: int) -> UpdateResult:
        """Blocks until the update of ``step`` is decided and applied; raises the engine's fault, if any."""
        with self._changed:
            while step not in self._results:
                self._failure.raise_if_failed()
                self._changed.wait(POLL_SECONDS)
            return self._results.pop(step)

    def close(self) -> None:
        """Lets submitted updates finish (or be dropped after a fault) and asks the thread to end."""
        self._stream.close()

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread; False when it still runs."""
        return self._stream.join(timeout_seconds)

    # -- the thread ----------------------------------------------------------------------------------------

    def _complete(self, update: Update) -> None:
        result = self._apply(update)
        with self._changed:
            self._results[result.step] = result
            self._changed.notify_all()

    def _wait(self, events: list[Event]) -> None:
        self._pause()
        for event in events:
            event.synchronize(self._failure)

    def _apply(self, update: Update) -> UpdateResult:
        ticket = update.ticket
        norm = self._gradient_norm(update) / ticket.trained_tokens
        self._wait(ticket.losses.ready)
        loss_sum = ticket.losses.total()
        rate = self._schedule(ticket.step)
        skipped = not (math.isfinite(norm) and math.isfinite(loss_sum))
        if skipped:
            self.skipped_steps += 1
            self._skipped_in_a_row += 1
        else:
            self._skipped_in_a_row = 0
        changed = [layer.layout.num_trained > 0 and not skipped for layer in self._store.layers]
        for index in range(len(changed)):
            if changed[index]:
                self._update_masters(update, index, rate, norm)
            ticket.read[index].set()
            if not update.delayed:
                self._publish(update, index, changed[index])
        if update.delayed:
            # The step that runs must bring down all its gradients before the last of its uploads can be, so no
            # upload is waited for until every layer's gradient is used up; then in the order of its uploads.
            for index in reversed(range(len(changed))):
                self._publish(update, index, changed[index])
        self.updates_applied += not skipped
        return UpdateResult(ticket.step, loss_sum, rate, norm, skipped, self._skipped_in_a_row, self.skipped_steps)

    def _gradient_norm(self, update: Update) -> float:
        """Norm of the gradient sum; first adds to each weight's gradient what other layers' uses of it gave."""
        square = 0.0
        borrowed: list[tuple[Piece, torch.Tensor]] = []
        for index in reversed(range(len(self._store.layers))):  # the order in which gradients land
            self._wait([update.ticket.landed[index]])
            layer = self._store.layers[index]
            for piece, part in borrowed:
                if piece.layer == index:
                    layer.gradient[piece.start : piece.stop].add_(part)
            borrowed += [
                (piece, layer.gradient[piece.region_offset : piece.region_offset + piece.length])
                for piece in layer.layout.borrowed_gradients
            ]
            # Row by row: one float32 norm over a large layer is off by 1e-2, its running sum being far too coarse.
            rows = layer.gradient[: layer.layout.num_trained].view(-1, ALIGNMENT_ELEMENTS)
            square += float(torch.linalg.vector_norm(rows, dim=1).double().square().sum())
        return math.sqrt(square)

    def _clip_coefficient(self, norm: float) -> float:
        """As ``torch.nn.utils.clip_grad_norm_``, whose 1e-6 keeps a zero norm from dividing."""
        if not self._max_grad_norm:
            return 1.0
        return min(1.0, self._max_grad_norm / (norm + 1e-6))

    def _update_masters(self, update: Update, index: int, rate: float, norm: float) -> None:
        """Updates a layer's masters and moments."""
        layer = self._store.layers[index]
        if layer.master_is_working:
            assert not update.delayed, "a delayed update needs a store with separate masters"
            self._wait(update.before.readers[index])
        divisor = update.ticket.trained_tokens / self._clip_coefficient(norm)
        self._algorithm.update(layer, rate, self.updates_applied, divisor)

    def _publish(self, update: Update, index: int, changed: bool) -> None:
        """Writes a layer's new working weights, if it has any, when nobody reads the old ones any more."""
        layer = self._store.layers[index]
        if changed and not layer.master_is_working:
            self._wait(update.before.readers[index])
            layer.working.copy_(layer.master)
        # A layer that is not written holds the new version as soon as it holds the old one.
        self._wait([update.before.written[index]])
        update.after.written[index].set()
