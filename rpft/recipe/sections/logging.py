"""Keys of `logging`: what a person sees, and where else figures go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rpft.recipe.section import Section


class Wandb(Section):
    """Figures go to Weights & Biases, too, when a project is named. Needs the package wandb."""

    project: str | None = Field(default=None, min_length=1, description="Its project. null: nothing goes there.")
    entity: str | None = Field(default=None, description="User or team. null: the one of the login.")
    name: str | None = Field(default=None, description="Name of the run. null: that of output_dir.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files in output_dir/wandb, for `wandb sync`."
    )


class Mlflow(Section):
    """Figures go to MLflow, too, when an experiment is named. Needs the package mlflow."""

    experiment: str | None = Field(
        default=None, min_length=1, description="Its experiment. null: nothing goes there."
    )
    tracking_uri: str | None = Field(
        default=None, description="Server or folder. null: what MLFLOW_TRACKING_URI says, or MLflow's own choice."
    )
    name: str | None = Field(default=None, description="Name of the run. null: that of output_dir.")


class Logging(Section):
    """What a person sees, and where else figures go; metrics.jsonl and run.log are written whatever is set."""

    console: Literal["auto", "rich", "plain"] = Field(
        default="auto",
        description="rich: a live display. plain: lines. auto: rich on a terminal, else plain.",
    )
    every_steps: int = Field(default=1, ge=1, description="Steps between lines of the plain console.")
    tensorboard: bool = Field(
        default=False,
        description="true: figures go to output_dir/tensorboard, too. Needs the package tensorboard.",
    )
    wandb: Wandb = Field(default_factory=Wandb, description=Wandb.__doc__)
    mlflow: Mlflow = Field(default_factory=Mlflow, description=Mlflow.__doc__)
    prometheus_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of this machine (127.0.0.1 only) at which /metrics has the last step's figures for"
        " Prometheus. null: none.",
    )
