"""What ends a run before its time: kinds of faults, their exit codes, and what is kept for looking at."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rpft import files
from rpft.engine.watchdog import Stalled
from rpft.errors import EXIT_DISK, EXIT_FAULT, EXIT_NOT_FINITE, EXIT_OUT_OF_MEMORY, EXIT_STALLED
from rpft.train.rows import RunData

_DISK = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ESTALE}
_NOT_FINITE_FOLDER = "not_finite"


class TrainingStopped(RuntimeError):
    """The run cannot go on usefully; the message says why and what to change."""


def exit_code(error: BaseException) -> int:
    """The exit code of a fault by its kind: that of the first known cause in its chain."""
    for cause in _chain(error):
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return EXIT_OUT_OF_MEMORY
        if isinstance(cause, Stalled):
            return EXIT_STALLED
        if isinstance(cause, TrainingStopped):
            return EXIT_NOT_FINITE
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return EXIT_DISK
    return EXIT_FAULT


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def not_finite(steps: range, half: bool, folder: Path) -> TrainingStopped:
    """The end after ``steps`` in a row that were skipped; ``folder`` holds their rows. ``half``: in float16."""
    return TrainingStopped(
        f"steps {steps[0]} to {steps[-1]} had a loss or gradient that is not finite and were skipped, so nothing"
        " was lost; the weights are those before them."
        + (" float16 overflows above 65,504: use model.dtype=bfloat16." if half else "")
        + f" Lower train.learning_rate, or look at the rows of these steps, in {folder}."
    )


def keep_batches(output_dir: Path, data: RunData, steps: range) -> Path:
    """Writes the microbatches of ``steps``, ids, labels and text, to OUTPUT_DIR/not_finite; gives that folder."""
    folder = output_dir / _NOT_FINITE_FOLDER
    folder.mkdir(exist_ok=True)
    for step in steps:
        batches = [_readable(data, batch) for batch in data.step(step)]
        files.write_whole(folder / f"step-{step:08d}.json", json.dumps({"step": step, "microbatches": batches}))
    return folder


def _readable(data: RunData, batch: Any) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids.tolist(),
        "labels": batch.labels.tolist(),
        "position_ids": None if batch.position_ids is None else batch.position_ids.tolist(),
        "text": data.tokenizer.batch_decode(batch.input_ids.tolist()),
    }
