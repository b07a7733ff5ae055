"""Figures for TensorBoard, as event files in the output directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpft.recipe.schema import Recipe

FOLDER = "tensorboard"


class ToTensorBoard:
    """Writes event files; a run that goes on hides what an earlier one wrote of the same steps."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, first_step: int) -> None:
        self._writer = self._make(str(self._folder), purge_step=first_step, flush_secs=10)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


def make(recipe: Recipe) -> ToTensorBoard:
    return ToTensorBoard(Path(recipe.output_dir) / FOLDER)
