"""Figures for Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.recipe.schema import Recipe
from rpft.train.sinks import keep_id, known_id, settings_of


class ToWandb:
    """One run there. Steps are an axis of its own, so that a run that went back can log a step again."""

    name = "Weights & Biases"

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def begin(self, first_step: int) -> None:
        """Nothing is hidden there: the later figure of a step counts."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def make(recipe: Recipe) -> ToWandb:
    """Begins a run there, or goes on with that of the output directory; UserError where it cannot be reached."""
    import wandb

    settings = recipe.logging.wandb
    try:
        run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or Path(recipe.output_dir).name,
            id=known_id(recipe, "wandb"),
            resume="allow",
            mode=settings.mode,
            dir=recipe.output_dir,
            config=settings_of(recipe),
            settings=wandb.Settings(console="off", silent=True),
        )
    except Exception as error:
        raise UserError(
            f"logging.wandb: no run could be begun: {error}. `wandb login` once, or logging.wandb.mode=offline"
        ) from error
    keep_id(recipe, "wandb", run.id)
    return ToWandb(run)
