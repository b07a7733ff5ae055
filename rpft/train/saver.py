"""Writes checkpoints while training goes on: the next update of a layer waits until the layer has been written.

    optimizer   | update t           | . waits . | update t + 1, layer 0 | layer 1 | ...
    saver                            | layer 0   | layer 1 | layer 2 | ...          | sync, rename |

Nothing is copied: layers are written straight from the host store, in the order in which the optimizer takes them.
It is held up only where the disk is slower than a step, and for no longer than the writing takes; what must be
synced afterwards holds up nobody.
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
from rpft.train.checkpoint_layers import write_layer
from rpft.train.shards import FileRecord


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
    """How long training was held up."""
    removed: list[Path]
    """Older checkpoints that went to make room."""


class Saver:
    """One save at a time. All methods but ``before_update`` are called from the main thread."""

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
        self._layouts = [layer.layout for layer in store.layers]
        self._ordered = [self._layouts[layer] for layer in store.update_order]
        self.checkpoint_bytes = checkpoint_bytes(self._layouts, lagging, store.state_format)
        self._changed = threading.Condition()
        self._step: int | None = None
        self._written = [True] * len(self._layouts)
        self._stall_seconds = 0.0
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
        with self._changed:
            self._step = step
            self._written = [layout.num_trained == 0 for layout in self._layouts]
            self._stall_seconds = time.monotonic() - began

    def start(self, state: TrainState) -> None:
        """Begins to write the state of the step that is armed, all of whose updates are applied."""
        assert self._step == state.step
        self._thread = EngineThread(lambda: self._save(state), "saver")
        self._thread.start()

    def before_update(self, step: int, layer: int) -> None:
        """Holds up the optimizer, before the update of ``step`` changes ``layer``, until the layer is written."""
        with self._changed:
            if not self._held(step, layer):
                return
            began = time.monotonic()
            while self._held(step, layer):
                self._failure.cancel_if_lost()
                self._changed.wait(POLL_SECONDS)
            self._stall_seconds += time.monotonic() - began

    def _held(self, step: int, layer: int) -> bool:
        # The step may be a later one by now: a save has ended and the next was asked for, which needs this update.
        return self._step is not None and step > self._step and not self._written[layer]

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
            path = self._folder.write(state, self._ordered, self._write_layer, self._before_commit)
        except Cancelled:
            pass
        except Exception as caught:  # a full or broken disk: the main thread says it
            error = caught
        size, seconds = self.checkpoint_bytes, time.monotonic() - began
        with self._changed:
            if path is not None or error is not None:
                report = SaveReport(state.step, path, error, size, seconds, self._stall_seconds, removed)
                self._reports.append(report)
            self._step = None
            self._changed.notify_all()

    def _write_layer(self, layer: int, path: Path) -> FileRecord:
        record = write_layer(self._store, self._lagging, layer, path, self._go_on)
        with self._changed:
            self._written[layer] = True
            self._changed.notify_all()
        return record

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
