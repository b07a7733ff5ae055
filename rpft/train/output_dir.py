"""Where the checkpoints and the result of a run lie in its output directory."""

from __future__ import annotations

from pathlib import Path

from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import CheckpointFolder


def checkpoint_folder(recipe: Recipe) -> CheckpointFolder:
    settings = recipe.checkpoint
    return CheckpointFolder(Path(recipe.output_dir), settings.keep_last, settings.keep_best)


def result_folder(recipe: Recipe) -> Path:
    """Where the trained model, or adapter, is written."""
    return Path(recipe.output_dir) / ("model" if recipe.adapter is None else "adapter")
