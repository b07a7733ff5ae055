"""Room on the disk for what a run will write, looked for before it begins."""

from __future__ import annotations

from pathlib import Path

from rpft import files
from rpft.model.frozen_file import frozen_files
from rpft.recipe.schema import Recipe
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


def room_bytes(recipe: Recipe) -> int:
    """Bytes that a run may have on the disk of its output directory; what is there of it already counts."""
    folders = checkpoint_folder(recipe).all()
    present = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    present += sum(file.stat().st_size for file in frozen_files(Path(recipe.output_dir)))
    return files.free_bytes(Path(recipe.output_dir)) + present
