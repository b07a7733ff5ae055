"""Room on the disk for what a run will write, looked for before it begins."""

from __future__ import annotations

from pathlib import Path

from rpft import files
from rpft.errors import UserError
from rpft.plan.bill import gib
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import checkpoint_bytes
from rpft.train.prepare import Prepared
from rpft.train.resume import checkpoint_folder


def most_checkpoints(recipe: Recipe, num_steps: int) -> int:
    """How many checkpoints are on the disk at once, at most, the one that is being written included."""
    settings = recipe.checkpoint
    saves = 1  # of an interrupt
    if settings.every_steps is not None:
        saves += num_steps // settings.every_steps
    if settings.every_minutes is not None:
        saves += num_steps
    # The new one is whole before the oldest goes.
    at_once = min(saves, settings.keep_last + 1) + settings.keep_best
    return min(at_once, 2) if settings.make_room else at_once


def disk_need(prepared: Prepared) -> tuple[int, int, int]:
    """Bytes of the result and of one checkpoint, and how many checkpoints there may be at once."""
    size = checkpoint_bytes(prepared.layouts, prepared.recipe.optimizer.update == "delayed")
    return prepared.bill.result, size, most_checkpoints(prepared.recipe, prepared.data.order.num_steps)


def refuse_without_room(prepared: Prepared) -> None:
    """UserError where the disk will not hold what the run writes; checkpoints that are there already count."""
    result, size, count = disk_need(prepared)
    output_dir = Path(prepared.recipe.output_dir)
    present = sum(
        file.stat().st_size for folder in checkpoint_folder(prepared.recipe).all() for file in folder.iterdir()
    )
    need, free = result + count * size, files.free_bytes(output_dir) + present
    if need > free:
        raise UserError(
            f"output_dir {output_dir}: the result takes {gib(result)} and {count} checkpoint(s) of {gib(size)} may"
            f" be there at once, {gib(need)} in all; {gib(free)} are free on that disk. Make room, give another"
            " output_dir, keep fewer with checkpoint.keep_last, or set checkpoint.make_room"
        )
