"""Writes checkpoints while training goes on: a layer that is not yet written is copied before its next update.

    workers     |          | step t + 1 . . . . . . . . . |          |                       | step t + 2 . . .
    optimizer   | update t |      | copies layers 1, 2 .. | update 0 | copies 9, update 9 .. |
    saver                  | layer 0 | layer 1 | layer 2 . . . . . . . . . .  | sync, rename |

Layers are written in the order in which the optimizer takes them, straight from the host store or from copies
(save_copies.py). Copies are made while the optimizer would only wait for gradients, and what is left of them
before a layer's update. That waits for the disk only where there is no room for a copy, until some is made; where
there is none at all, as with moments in a file, until the layer is written. To sync it all holds up nobody.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rpft import files
from rpft.engine.failure import POLL_SECONDS, Cancelled, Failure
from rpft.engine.streams import EngineThread
from rpft.model.host_store import HostStore
from rpft.plan.bill import gib
from rpft.train.checkpoint import CheckpointFolder, TrainState, checkpoint_bytes
from rpft.train.checkpoint_layers import layer_pieces, write_layer
from rpft.train.save_copies import SaveCopies
from rpft.train.shards import FileRecord
from rpft.train.spare_memory import SpareMemory


class NoRoom(OSError):
    """The disk is too full for a checkpoint."""


@dataclass(frozen=True)
class SaveReport:
    """What became of one save. ``path`` is None where ``error`` is not."""

    step: int
    path: Path | None
    error: Exception | None
    num_bytes: int
    seconds: float
    stall_seconds: float
    """How long training was held up, by copying and by waiting for the disk."""
    copied_bytes: int
    """That were written from copies, since the disk was slower than a step."""
    removed: list[Path]
    """Older checkpoints that went to make room."""


class Saver:
    """One save at a time. All methods but the optimizer's two are called from the main thread."""

    def __init__(
        self,
        folder: CheckpointFolder,
        store: HostStore,
        failure: Failure,
        *,
        lagging: bool,
        may_make_room: bool,
        before_commit: Callable[[], None],
    ) -> None:
        """``lagging``: whether working weights are of the update before and are to be kept, too.

        ``may_make_room``: whether older checkpoints may go when the disk is too full. ``before_commit``: called
        before a checkpoint is whole, in the saver's thread.
        """
        self._folder, self._store, self._failure = folder, store, failure
        self._lagging, self._may_make_room, self._before_commit = lagging, may_make_room, before_commit
        self._layouts = [store.layers[layer].layout for layer in store.update_order]
        self.checkpoint_bytes = checkpoint_bytes(self._layouts, lagging, store.state_format)
        self._changed = threading.Condition()
        self._step: int | None = None
        self._memory = SpareMemory(self._changed)
        self._copies: SaveCopies | None = None
        """Of the step that is armed."""
        self._waited_seconds = 0.0
        """For the save before."""
        self._given_up = False
        self._thread: threading.Thread | None = None
        self._reports: list[SaveReport] = []
        self.progress_bytes = 0
        """Written since the run began; for whoever watches that something happens."""

    @property
    def armed_step(self) -> int | None:
        """The step whose state is to be saved or is being saved."""
        return self._step

    def arm(self, step: int) -> None:
        """No update after that of ``step`` changes a layer from now on until ``start`` has had it written.

        Waits for an earlier save to end. To be called before a later step's update can be ordered.
        """
        began = time.monotonic()
        self.wait()
        layers = {layer: layer_pieces(self._store, self._lagging, layer) for layer in self._store.update_order}
        with self._changed:
            self._disarm()
            self._step = step
            self._copies = SaveCopies(layers, self._memory, self._changed, self._failure)
            self._waited_seconds = time.monotonic() - began

    def start(self, state: TrainState) -> None:
        """Begins to write the state of the step that is armed, all of whose updates are applied."""
        assert self._step == state.step
        self._thread = EngineThread(lambda: self._save(state), "saver")
        self._thread.start()

    # -- the optimizer's thread ----------------------------------------------------------------------------

    def before_update(self, step: int, layer: int) -> None:
        """Before the update of ``step`` changes ``layer``: what is to be saved of it is copied, or written first.

        Copies are made by the calling thread, in as many threads as torch has there.
        """
        copies = self._copies_before(step)
        if copies is not None:
            copies.free(layer)

    def copy_ahead(self, step: int) -> bool:
        """Copies some of what must be before the updates of ``step``; False where nothing is left or has room."""
        copies = self._copies_before(step)
        return copies is not None and copies.copy_ahead()

    def _copies_before(self, step: int) -> SaveCopies | None:
        with self._changed:
            return self._copies if self._step is not None and step > self._step else None

    # -- memory for copies ---------------------------------------------------------------------------------

    def take_memory(self, num_bytes: int, left_free_bytes: int) -> None:
        """Takes ``num_bytes`` of RAM for copies, or as many as leave that much free; does not wait for them.

        They are kept to the end: at a later save they might not be there, and to touch them anew takes time.
        """
        self._memory.take(num_bytes, left_free_bytes)

    def limit_memory(self, num_bytes: int) -> None:
        """Gives back what is more than ``num_bytes``; where that is any, a save in progress is waited for."""
        if self._memory.ready_bytes > num_bytes:
            self.wait()
        self._memory.limit(num_bytes)
        with self._changed:
            if self._copies is None or not self._copies.in_use:
                self._memory.trim()

    def close(self) -> None:
        """Gives all memory back. To be called when no save is in progress and no update can come."""
        self._memory.close()

    # -- the end of a save ---------------------------------------------------------------------------------

    def wait(self) -> None:
        """Returns when no save is in progress."""
        while self._thread is not None:
            self._thread.join(POLL_SECONDS)
            if not self._thread.is_alive():
                self._thread = None

    def take_reports(self) -> list[SaveReport]:
        """What became of the saves that ended since the last call."""
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def give_up(self) -> None:
        """Ends a save that is in progress, unless it is about to be whole; waits for its thread."""
        self._given_up = True
        self.wait()

    # -- the thread ----------------------------------------------------------------------------------------

    def _save(self, state: TrainState) -> None:
        began, removed = time.monotonic(), []
        path, error = None, None
        try:
            self._make_room(state, removed)
            path = self._folder.write(state, self._layouts, self._write_layer, self._before_commit)
        except Cancelled:
            pass
        except Exception as caught:  # a full or broken disk: the main thread says it
            error = caught
        seconds = time.monotonic() - began
        with self._changed:
            assert self._copies is not None
            if path is not None or error is not None:
                stall_seconds = self._waited_seconds + self._copies.stall_seconds
                report = SaveReport(
                    step=state.step,
                    path=path,
                    error=error,
                    num_bytes=self.checkpoint_bytes,
                    seconds=seconds,
                    stall_seconds=stall_seconds,
                    copied_bytes=self._copies.copied_bytes,
                    removed=removed,
                )
                self._reports.append(report)
            self._disarm()

    def _disarm(self) -> None:
        """No update need mind the save any more: it is whole, or will not be."""
        if self._copies is not None:
            self._copies.end()
            self._memory.trim()
        self._step = self._copies = None

    def _write_layer(self, layer: int, path: Path) -> FileRecord:
        assert self._copies is not None
        return write_layer(self._store, self._lagging, layer, path, self._go_on, self._copies.take)

    def _go_on(self, num_bytes: int) -> None:
        if self._given_up:
            raise Cancelled
        self.progress_bytes += num_bytes

    def _make_room(self, state: TrainState, removed: list[Path]) -> None:
        """Removes old checkpoints where that is allowed and needed; NoRoom where it does not help."""
        while (free := files.free_bytes(self._folder.path)) < self.checkpoint_bytes:
            gone = self._folder.remove_oldest(state.best_step) if self._may_make_room else None
            if gone is None:
                raise NoRoom(
                    errno.ENOSPC,
                    f"the checkpoint of step {state.step} takes {gib(self.checkpoint_bytes)} and {gib(free)} are"
                    f" free on the disk of {self._folder.path}",
                )
            removed.append(gone)
