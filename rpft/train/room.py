"""Room on the disk for what a run will write, looked for before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from rpft import files
from rpft.errors import UserError
from rpft.model.frozen_file import frozen_files
from rpft.model.scratch_file import lies_in_ram
from rpft.recipe.schema import Recipe
from rpft.train.output_dir import checkpoint_folder


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


def check_offload(folder: Path) -> None:
    """UserError where the folder of ``optimizer.offload`` is none, cannot be written, or is itself RAM."""
    if not folder.exists():
        raise UserError(f"optimizer.offload {folder}: there is no such folder; make it, or name another")
    if not folder.is_dir():
        raise UserError(
            f"optimizer.offload {folder}: that is a file; name a folder, in which the moments' own will lie"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"optimizer.offload {folder}: you may not write there; name another folder")
    if lies_in_ram(folder):
        raise UserError(
            f"optimizer.offload {folder}: that folder lies in RAM (tmpfs), so it would save none; name one on a"
            " disk, or leave optimizer.offload out"
        )


def room_apart(folder: Path, recipe: Recipe) -> int | None:
    """Bytes free on the disk of ``folder``; None where it is that of the output directory."""
    beside = files.existing_folder(Path(recipe.output_dir))
    return None if folder.stat().st_dev == beside.stat().st_dev else files.free_bytes(folder)
