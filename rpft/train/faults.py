"""What ends a run before its time: kinds of faults, their exit codes, and what is kept for looking at."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from rpft import files
from rpft.engine.failure import causes, out_of_device_memory
from rpft.engine.watchdog import Stalled
from rpft.errors import EXIT_DISK, EXIT_FAULT, EXIT_NOT_FINITE, EXIT_OUT_OF_MEMORY, EXIT_STALLED
from rpft.train.rows import RunData

_DISK = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ESTALE}
_NO_RAM = "DefaultCPUAllocator: can't allocate memory"
"""What torch says of a host without memory; it has no class of its own for that."""
NOT_FINITE, LOSS_SPIKE = "not_finite", "loss_spike"
"""Folders for the rows of steps that should be looked at."""


class TrainingStopped(RuntimeError):
    """The run cannot go on usefully; the message says why and what to change."""


def exit_code(error: BaseException) -> int:
    """The exit code of a fault by its kind: that of the first known cause in its chain."""
    if out_of_device_memory(error):
        return EXIT_OUT_OF_MEMORY
    for cause in causes(error):
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return EXIT_OUT_OF_MEMORY
        if isinstance(cause, RuntimeError) and _NO_RAM in str(cause):
            return EXIT_OUT_OF_MEMORY
        if isinstance(cause, Stalled):
            return EXIT_STALLED
        if isinstance(cause, TrainingStopped):
            return EXIT_NOT_FINITE
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return EXIT_DISK
    return EXIT_FAULT


def not_finite(steps: range, half: bool, rows: str) -> TrainingStopped:
    """The end after ``steps`` in a row that were skipped; ``rows`` says where theirs are. ``half``: in float16."""
    return TrainingStopped(
        f"steps {steps[0]} to {steps[-1]} had a loss or gradient that is not finite and were skipped, so nothing"
        " was lost; the weights are those before them."
        + (" float16 overflows above 65,504: use model.dtype=bfloat16." if half else "")
        + f" Lower train.learning_rate, or look at the rows of these steps{rows}."
    )


def too_many_spikes(steps: range, rewinds: int, rows: str, before: Path | None) -> TrainingStopped:
    """The end after a spike of the loss at ``steps`` where the run has gone back ``rewinds`` times already.

    ``before``: the last checkpoint from before the spike.
    """
    return TrainingStopped(
        f"the loss of steps {steps[0]} to {steps[-1]} was far above that of the steps before, and the run has gone"
        f" back {rewinds} time(s) already (checkpoint.most_rewinds). Lower train.learning_rate, or look at the"
        f" rows of these steps{rows}; the last checkpoint from before them is {before or 'none'}."
    )


def keep_batches(output_dir: Path, data: RunData, steps: range, why: str = NOT_FINITE) -> str:
    """Writes the microbatches of ``steps``, ids, labels and text, to OUTPUT_DIR/WHY; words that say where."""
    folder = output_dir / why
    try:
        folder.mkdir(exist_ok=True)
        for step in steps:
            batches = [_readable(data, batch) for batch in data.step(step)]
            text = json.dumps({"step": step, "microbatches": batches})
            files.write_whole(folder / f"step-{step:08d}.json", text)
    except OSError as error:  # what is to be said matters more
        return f" (which could not be written to {folder}: {error})"
    return f", in {folder}"


def _readable(data: RunData, batch: Any) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids.tolist(),
        "labels": batch.labels.tolist(),
        "position_ids": None if batch.position_ids is None else batch.position_ids.tolist(),
        "text": data.tokenizer.batch_decode(batch.input_ids.tolist()),
    }
