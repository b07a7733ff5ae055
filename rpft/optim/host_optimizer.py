"""The optimizer's thread: takes updates in order, checks them, clips them, applies them layer by layer.

Nothing is written before the whole step's gradient has been seen to be finite: a step that is not is skipped.
From there on an update needs nothing more of the workers, so that one which has begun is finished although they
run out of memory: every layer has had it, or none. Layers are updated in the order in which something waits for
them (HostStore.update_order).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rpft.engine.controller import Update
from rpft.engine.failure import POLL_SECONDS, Failure
from rpft.engine.streams import Delays, Event, Stream
from rpft.engine.trace import CHECKPOINT, COMPUTE, GRADIENTS, WEIGHTS
from rpft.engine.tracer import span, standing_still
from rpft.model.host_store import HostStore
from rpft.model.layout import ALIGNMENT_ELEMENTS, align
from rpft.model.moments import Moments
from rpft.optim.adamw import AdamW, BorrowedGradient, LayerUpdate, gradient_parts
from rpft.optim.moments_window import MomentsWindow
from rpft.optim.one_pass import FusedPass, OnePass
from rpft.optim.schedule import Schedule
from rpft.optim.threads import openmp_threads


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
    update_seconds: float = field(default=0.0, compare=False)
    """From the arrival of the last gradient until all layers are updated: how far that came behind the workers."""
    layer_norms: tuple[float | None, ...] = ()
    """As ``grad_norm``, of embedding, blocks and head, however these are cut into layers; None: it has no trained
    weight of its own. Of a step passed over: ()."""
    router_aux_loss: float | None = None
    """Load-balancing loss of the routers, without its coefficient; None where there is none."""


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
        skipped_in_a_row: int = 0,
        kernels: OnePass | None = None,
        before_update: Callable[[int, int], None] = lambda step, layer: None,
        do_ahead: Callable[[int], bool] = lambda step: False,
        last_step: int = 0,
    ) -> None:
        """``updates_applied``: updates that the store's moments have had; it and what follows are of a run that
        goes on, as is ``last_step``, the last that was updated.

        ``kernels``: what runs the update, torch's fused kernel where not given. ``before_update``: called with
        step and layer before anything of a layer changes that an earlier step left; may hold the thread up.
        ``do_ahead``: called with a step again and again while its gradients are waited for; does a little of what
        ``before_update`` would have to, and says whether there may be more.
        """
        self._store, self._algorithm, self._schedule = store, algorithm, schedule
        self._kernels = kernels or FusedPass()
        self._before_update, self._do_ahead = before_update, do_ahead
        self._borrowed = _borrowed_gradients(store)
        self._updates: dict[tuple[int, int, int], LayerUpdate] = {}
        """By layer, and the copies of working weights that are read and written."""
        self._max_grad_norm = max_grad_norm
        self._failure, self._delays, self._pause = failure, delays, delays.of("optimizer")
        self.updates_applied = updates_applied
        self.skipped_steps = skipped_steps
        self._skipped_in_a_row = skipped_in_a_row
        self.last_step = last_step
        """The last step whose update is decided and applied."""
        self._results: dict[int, UpdateResult] = {}
        self._changed = threading.Condition()
        self.restart()

    def restart(self) -> None:
        """Begins anew, behind the last update that was applied, after a fault that ended the threads."""
        self.stream = Stream("optimizer", self._failure, self._delays)
        file = self._store.moments_file
        self._window = (
            None if file is None else MomentsWindow(file, self._store.update_order, self._failure, self._delays)
        )

    @property
    def streams(self) -> list[Stream]:
        """The optimizer's own, and those of the disk where moments lie on one."""
        return [self.stream] if self._window is None else [self.stream, *self._window.streams]

    def pass_over(self, step: int) -> UpdateResult:
        """Counts ``step`` as skipped, without an update. All steps before it must have been waited for."""
        self.last_step = step
        self.skipped_steps += 1
        rate = self._schedule(step)
        return UpdateResult(step, math.nan, rate, math.nan, True, self._skipped_in_a_row, self.skipped_steps)

    def submit(self, update: Update) -> None:
        self.stream.run(lambda: self._complete(update), f"the update of step {update.ticket.step}")

    def wait(self, step: int) -> UpdateResult:
        """Blocks until the update of ``step`` is decided and applied; raises the engine's fault, if any."""
        with self._changed:
            while step not in self._results:
                self._failure.raise_if_failed()
                self._changed.wait(POLL_SECONDS)
            return self._results.pop(step)

    def close(self) -> None:
        """Lets submitted updates finish (or be dropped after a fault) and asks the threads to end."""
        self.stream.close()

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the threads, those of a disk after the optimizer's own; False when one still runs."""
        if not self.stream.join(timeout_seconds):
            return False
        self._updates.clear()  # holds gradients, whose memory may be wanted
        return self._window is None or self._window.close(timeout_seconds)

    # -- the thread ----------------------------------------------------------------------------------------

    def _complete(self, update: Update) -> None:
        with openmp_threads(self._kernels.num_threads):
            result = self._apply(update)
        with self._changed:
            self.last_step = result.step
            self._results[result.step] = result
            self._changed.notify_all()

    def _wait(self, events: list[Event], cause: str) -> None:
        self._pause()
        with standing_still(cause):
            for event in events:
                event.synchronize(self._failure)

    def _use_time_until(self, landed: Event, step: int) -> None:
        while not landed.complete and self._do_ahead(step):
            self._failure.cancel_if_failed()

    def _apply(self, update: Update) -> UpdateResult:
        ticket = update.ticket
        squares = self._gradient_squares(update)
        norm = math.sqrt(math.fsum(squares)) / ticket.trained_tokens
        self._wait([*ticket.losses.ready, *ticket.router_losses.ready], COMPUTE)
        landed = time.perf_counter()
        loss_sum = ticket.losses.total()
        rate = self._schedule(ticket.step)
        skipped = not (math.isfinite(norm) and math.isfinite(loss_sum))
        if skipped:
            self.skipped_steps += 1
            self._skipped_in_a_row += 1
        else:
            self._skipped_in_a_row = 0
        for index in self._store.update_order:
            if self._store.layers[index].layout.num_trained > 0:
                self._write_layer(update, index, None if skipped else rate, norm)
            ticket.read[index].set()
            update.after.written[index].set()
        if self._window is not None:
            self._window.settle()
        self.updates_applied += not skipped
        seconds = time.perf_counter() - landed
        counts = self._skipped_in_a_row, self.skipped_steps
        layer_norms = tuple(
            math.sqrt(math.fsum(own)) / ticket.trained_tokens if own else None for own in self._by_number(squares)
        )
        balance = (
            ticket.router_losses.exact_total() / ticket.trained_tokens if ticket.router_losses.values else None
        )
        return UpdateResult(ticket.step, loss_sum, rate, norm, skipped, *counts, seconds, layer_norms, balance)

    def _gradient_squares(self, update: Update) -> list[float]:
        """The square of each layer's gradient sum. Workers have taken all but those of weights with two uses."""
        squares: list[float | None] = [None] * len(self._store.layers)
        for index in reversed(range(len(self._store.layers))):  # the order in which gradients land
            self._use_time_until(update.ticket.landed[index], update.ticket.step)
            self._wait([update.ticket.landed[index]], GRADIENTS)
            if self._borrowed[index]:
                parts = gradient_parts(self._store.layers[index], self._borrowed[index])
                with span(f"norm of layer {index}"):
                    squares[index] = sum(self._kernels.square_sum(gradients) for _, gradients in parts)
        own = update.ticket.squares.tolist()  # all have landed
        return [square if square is not None else own[index] for index, square in enumerate(squares)]

    def _by_number(self, squares: list[float]) -> list[list[float]]:
        """Of embedding, each block and head those ``squares`` that are of trained parts of it."""
        layouts = [layer.layout for layer in self._store.layers]
        found: list[list[float]] = [[] for _ in range(1 + layouts[-1].number)]
        for layout, square in zip(layouts, squares, strict=True):
            if layout.num_trained > 0:
                found[layout.number].append(square)
        return found

    def _clip_coefficient(self, norm: float) -> float:
        """As ``torch.nn.utils.clip_grad_norm_``, whose 1e-6 keeps a zero norm from dividing."""
        if not self._max_grad_norm:
            return 1.0
        return min(1.0, self._max_grad_norm / (norm + 1e-6))

    def _write_layer(self, update: Update, index: int, rate: float | None, norm: float) -> None:
        """Updates a layer's masters, moments and working weights; without a ``rate`` it keeps what it has."""
        layer, source, target = self._store.layers[index], update.before.copy, update.after.copy
        if rate is None and source == target:
            return
        self._wait(update.replaced.readers[index], WEIGHTS)
        with standing_still(CHECKPOINT):
            self._before_update(update.ticket.step, index)
        if rate is None:
            layer.copy(target).copy_(layer.copy(source))
            layer.latest = target
            return
        divisor = update.ticket.trained_tokens / self._clip_coefficient(norm)
        if self._window is None:
            with span(f"update of layer {index}"):
                self._update_of(index, source, target)(rate, self.updates_applied, divisor)
            return
        for piece in self._window.pieces(index):
            with span(f"update of layer {index} [{piece[0].start}..{piece[0].stop}]"):
                found = self._layer_update(index, source, target, piece)
                found(rate, self.updates_applied, divisor)

    def _update_of(self, index: int, source: int, target: int) -> LayerUpdate:
        """The same one in every step: to find where things lie takes longer than the update of a small layer."""
        key = index, source, target
        if key not in self._updates:
            self._updates[key] = self._layer_update(index, source, target)
        return self._updates[key]

    def _layer_update(
        self, index: int, source: int, target: int, piece: tuple[slice, Moments] | None = None
    ) -> LayerUpdate:
        layer, borrowed = self._store.layers[index], self._borrowed[index]
        return LayerUpdate(self._algorithm, self._kernels, layer, borrowed, source, target, piece)


def _borrowed_gradients(store: HostStore) -> list[list[BorrowedGradient]]:
    """For each layer the gradients that other layers' uses of its weights give."""
    borrowed: list[list[BorrowedGradient]] = [[] for _ in store.layers]
    for layer in store.layers:
        for piece in layer.layout.borrowed_gradients:
            length = align(piece.length, ALIGNMENT_ELEMENTS)  # to its end a tensor's place is padded with zeros
            gradient = layer.gradient[piece.region_offset : piece.region_offset + length]
            borrowed[piece.layer].append((slice(piece.start, piece.start + length), gradient))
    return borrowed
